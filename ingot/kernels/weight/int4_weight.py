"""A weight of 4 bits inside values of 8 (QServe, arXiv 2405.04532): as it is stored, and as int8.

W = scale · (q - zero) · step, with one fp32 scale per row, and a whole step and zero per group of columns. (q
- zero) · step is exactly an int8 value, so one int32 sum runs over all of K and only the scale multiplies it.
expand_int8.py is tested against this file.

    weight = Int4Weight(pack_pairs(numbers, 128), steps, zeros, scales, 128, in_features)
    w8 = expanded(weight)                              # Int8Weight: values int8 [N, K]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_contiguous
from ingot.kernels.rows.int8_rows import Int8Weight
from ingot.kernels.weight.stored_weight import PIECE

GROUPS = (128, 64)
MOST_NUMBER = 15  # quantized values are 0 … 15
MOST_STEP = 16


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight [N, K].

    Attributes:
        pairs: uint8 [N, whole groups / 2], rows contiguous. In a group of G columns byte j holds column j in
            its low half and column j + G/2 in its high half; values past K are their group's zero.
        steps: uint8 [groups, N], 1 to 16.
        zeros: uint8 [groups, N], such that (0 - zero) · step ≥ -128 and (15 - zero) · step ≤ 127.
        scales: fp32 [N].
        group: G, of ``GROUPS``.
        in_features: K.
    """

    pairs: torch.Tensor
    steps: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group: int
    in_features: int


AnyInt8 = Int8Weight | Int4Weight  # what a product in 8 bits multiplies by


def as_int8(weight: AnyInt8) -> Int8Weight:
    """The weight as whole rows of int8, in plain PyTorch."""
    return expanded(weight) if isinstance(weight, Int4Weight) else weight


def outputs_of(weight: AnyInt8) -> int:
    """N."""
    return len(weight.scales) if isinstance(weight, Int4Weight) else len(weight.values)


def num_groups(in_features: int, group: int) -> int:
    """Groups per row, the last one padded."""
    return -(-in_features // group)


def pack_pairs(numbers: torch.Tensor, group: int, zeros: torch.Tensor) -> torch.Tensor:
    """Quantized values uint8 [N, K] → ``Int4Weight.pairs``; ``zeros`` as there pad the last group."""
    missing = -numbers.shape[1] % group
    filled = torch.cat([numbers, zeros[-1][:, None].expand(-1, missing)], dim=1)
    low, high = filled.unflatten(1, (-1, 2, group // 2)).unbind(2)
    return (low | (high << 4)).flatten(1).contiguous()


def numbers_of(weight: Int4Weight) -> torch.Tensor:
    """The quantized values, uint8 [N, whole groups]."""
    halves = weight.pairs.unflatten(1, (-1, 1, weight.group // 2))
    return torch.cat([halves & 15, halves >> 4], dim=2).flatten(1)


def expanded(weight: Int4Weight) -> Int8Weight:
    """The weight as int8 products read it, in plain PyTorch: a view [N, K] of rows of whole groups."""
    outputs, width = weight.pairs.shape[0], 2 * weight.pairs.shape[1]
    values = torch.empty((outputs, width), dtype=torch.int8, device=weight.pairs.device)
    rows = max(1, PIECE // width)
    for start in range(0, outputs, rows):
        values[start : start + rows] = _values(rows_of(weight, start, start + rows))
    return Int8Weight(values[:, : weight.in_features], weight.scales, temporary=True)


def _values(weight: Int4Weight) -> torch.Tensor:
    """int8 [N, whole groups]; takes eight bytes per value meanwhile."""
    numbers = numbers_of(weight).to(torch.int16).unflatten(1, (-1, weight.group))  # [N, groups, G]
    steps, zeros = (t.T[..., None].to(torch.int16) for t in (weight.steps, weight.zeros))
    return ((numbers - zeros) * steps).to(torch.int8).flatten(1)


def fits_int8(steps: torch.Tensor, zeros: torch.Tensor) -> bool:
    """Whether every value that a group can have fits int8."""
    wide = steps.to(torch.int32)
    low, high = -zeros.to(torch.int32) * wide, (MOST_NUMBER - zeros.to(torch.int32)) * wide
    return bool(((low >= -128) & (high <= 127) & (wide >= 1)).all())


def rows_of(weight: Int4Weight, start: int, end: int) -> Int4Weight:
    """Outputs ``start`` to ``end``, as views."""
    rows = slice(start, end)
    steps, zeros = weight.steps[:, rows], weight.zeros[:, rows]
    return Int4Weight(weight.pairs[rows], steps, zeros, weight.scales[rows], weight.group, weight.in_features)


def expect_int4(weight: Int4Weight) -> None:
    """Raise unless the kernels can read the weight."""
    if weight.group not in GROUPS:
        raise KernelArgumentError("unsupported group size", seen=weight.group, allowed=list(GROUPS))
    outputs, groups = weight.pairs.shape[0], num_groups(weight.in_features, weight.group)
    like = weight.pairs
    expect("pairs", like, (None, groups * weight.group // 2), like=like, dtype=torch.uint8)
    expect_contiguous("pairs", like)
    for name, tensor in (("steps", weight.steps), ("zeros", weight.zeros)):
        expect(name, tensor, (groups, outputs), like=like, dtype=torch.uint8)
    expect("scales", weight.scales, (outputs,), like=like, dtype=torch.float32)
