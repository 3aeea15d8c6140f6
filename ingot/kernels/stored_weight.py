"""A weight matrix as it is stored: whole, in 8 bits, or in 4.

Owns the three layouts that products read, their checks and their meaning in floating point. Knows no product,
and no way of choosing the numbers.

    weight = StoredWeight(values, in_features, scales)
    wide = dequantized(weight, torch.float32)          # [N, K]

A weight W [N, K] is one of

- dense: ``values`` [N, K] in the dtype of the activations;
- 8 bits: ``values`` [N, K] int8, W = values · scales, one scale a row: ``scales`` [N];
- 4 bits: ``values`` [N, words] int16, four unsigned numbers q of 4 bits a word, W = (q - zero) · scale, with
  ``scales`` [N] (``group`` 0) or [groups, N] (``group`` columns share a scale), and ``zeros`` uint8 of the
  same shape, or None for 8 everywhere. Columns go in chunks of ``chunk_columns(group)`` = C: bits 4 i to
  4 i + 3 of word j of a chunk are its column i · C / 4 + j, so that one shift of whole words yields C / 4
  neighbouring columns. The last chunk is filled with zeros of W.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.kernels.checks import KernelArgumentError, expect

SYMMETRIC_ZERO = 8
GROUPS = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """See the module; ``group`` 0: one scale a row."""

    values: torch.Tensor
    in_features: int
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    group: int = 0

    @property
    def out_features(self) -> int:
        """N."""
        return self.values.shape[0]

    @property
    def bits(self) -> int:
        """8 and 4; 16 for a dense weight, whatever its dtype."""
        return {torch.int8: 8, torch.int16: 4}.get(self.values.dtype, 16)

    @property
    def itemsize(self) -> float:
        """Bytes a number."""
        return 0.5 if self.bits == 4 else float(self.values.element_size())


AnyWeight = torch.Tensor | StoredWeight


def stored(weight: AnyWeight) -> StoredWeight:
    """A tensor as a dense weight; others as they are."""
    return weight if isinstance(weight, StoredWeight) else StoredWeight(weight, weight.shape[1])


def chunk_columns(group: int) -> int:
    """Columns of a chunk of 4-bit numbers: a quarter lies within one group."""
    return 4 * min(group or 64, 64)


def num_words(in_features: int, group: int) -> int:
    """Words of a row in 4 bits."""
    chunk = chunk_columns(group)
    return -(-in_features // chunk) * (chunk // 4)


def pack_words(numbers: torch.Tensor, group: int, fill: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits [N, K] uint8 as words [N, ``num_words``] int16; ``fill`` [N] uint8 after the end."""
    chunk = chunk_columns(group)
    rows, columns = numbers.shape
    whole = fill[:, None].repeat(1, -(-columns // chunk) * chunk)
    whole[:, :columns] = numbers
    parts = whole.view(rows, -1, 4, chunk // 4).to(torch.int32)
    words = parts[:, :, 0] | parts[:, :, 1] << 4 | parts[:, :, 2] << 8 | parts[:, :, 3] << 12
    return words.to(torch.int16).view(rows, -1)  # the upper half wraps to negative numbers


def unpacked(weight: StoredWeight) -> torch.Tensor:
    """The numbers of 4 bits [N, K] uint8."""
    quarter = chunk_columns(weight.group) // 4
    words = weight.values.to(torch.int32).view(weight.out_features, -1, 1, quarter)
    shifts = torch.arange(0, 16, 4, device=words.device, dtype=torch.int32)[None, None, :, None]
    return (words >> shifts & 15).to(torch.uint8).view(weight.out_features, -1)[:, : weight.in_features]


def dequantized(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K]: computed in fp32 and rounded to ``dtype`` once; in fp64 where that is the dtype."""
    if weight.scales is None:
        return weight.values.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if weight.bits == 8:
        return (weight.values.to(wide) * weight.scales.to(wide)[:, None]).to(dtype)
    numbers = unpacked(weight).to(wide)
    if weight.zeros is None:
        numbers -= SYMMETRIC_ZERO
    else:
        numbers -= by_column(weight.zeros, weight).to(wide)
    return (numbers * by_column(weight.scales, weight).to(wide)).to(dtype)


def by_column(numbers: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """Scales or zeros as they stand beside the columns: [N, 1], or [N, K] for groups."""
    if numbers.dim() == 1:
        return numbers[:, None]
    return numbers.repeat_interleave(weight.group, dim=0)[: weight.in_features].T


def expect_weight(weight: StoredWeight, x: torch.Tensor, out_features: int | None = None) -> None:
    """Raise unless a product of ``x`` [M, K] can read the weight."""
    columns = x.shape[1]
    if weight.in_features != columns:
        raise KernelArgumentError("weight has another width", seen=weight.in_features, allowed=columns)
    outputs = weight.out_features if out_features is None else out_features
    if weight.bits == 16:
        expect("weight", weight.values, (outputs, columns), like=x)
        return
    shape: tuple[int, ...] = (outputs,)
    if weight.group:
        if weight.bits == 8 or weight.group not in GROUPS:
            raise KernelArgumentError("no such group size", seen=weight.group, allowed=f"4 bits: {GROUPS}")
        shape = (-(-columns // weight.group), outputs)
    words = columns if weight.bits == 8 else num_words(columns, weight.group)
    expect("weight", weight.values, (outputs, words), like=x, dtype=weight.values.dtype)
    if weight.scales is None:
        raise KernelArgumentError("weight has no scales", seen=weight.values.dtype)
    expect("scales", weight.scales, shape, like=x)
    if weight.zeros is not None:
        expect("zeros", weight.zeros, shape, like=x, dtype=torch.uint8)
