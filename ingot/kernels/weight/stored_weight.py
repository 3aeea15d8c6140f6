"""A weight matrix as it is stored, dense or in 8 or 4 bits: the layout that products read.

    weight = StoredWeight(words, in_features, scales, bits=4, group=128)
    wide = dequantized(weight, torch.float32)          # [N, K]

A weight W [N, K] is either dense, ``values`` [N, K] in the activations' dtype, or quantized: W = (q - zero) ·
scale, with ``scales`` [N] (``group`` 0: one per row) or [groups, N] (one per ``group`` neighbouring columns),
and ``zeros`` uint8 of the same shape, or None for 128 (8 bits) or 8 (4 bits). With ``order`` the stored
columns are W's columns ``order``: a product reads them with an input whose columns are in that order.
Quantized values are unsigned, P = 16 / bits per word: ``values`` [rows, words] int16.

Columns come in chunks of C = P · ``part_columns(group)``. Value i of word j of a chunk is the chunk's column
i · C / P + j, so each part of the words, moved to the lowest bits by one shift, is C / P neighbouring
columns. The last chunk is padded with zeros of W, and rows to a multiple of 16.

Words of 16 rows by 32 columns lie together, in the order in which the 32 threads of a warp hold the left
operand of a tensor core's product: thread 4 g + t has rows 2 g and 2 g + 1, of each the words 8 t to 8 t + 7.
First come the first four words of both rows of every thread, then the others. Such pieces follow each other
along the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ingot.kernels.kernel_checks import KernelArgumentError, expect

GROUPS = (32, 64, 128, 256, 512, 1024)
WORD_BITS = 16
BLOCK_ROWS = 16  # rows whose words lie together
PIECE = 1 << 20  # values of a weight that are widened at once


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """See the module; ``bits`` 16: dense, whatever the dtype."""

    values: torch.Tensor
    in_features: int
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    bits: int = 16
    group: int = 0
    order: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        """N."""
        return self.values.shape[0] if self.scales is None else self.scales.shape[-1]


AnyWeight = torch.Tensor | StoredWeight


def stored(weight: AnyWeight) -> StoredWeight:
    """A tensor as a dense weight; a stored weight as it is."""
    return weight if isinstance(weight, StoredWeight) else StoredWeight(weight, weight.shape[1])


def part_columns(group: int) -> int:
    """Neighbouring columns in a part of the words, all of one group."""
    return min(group or 64, 64)


def chunk_columns(bits: int, group: int) -> int:
    """Columns per chunk."""
    return WORD_BITS // bits * part_columns(group)


def num_words(in_features: int, bits: int, group: int) -> int:
    """Words per row."""
    return -(-in_features // chunk_columns(bits, group)) * part_columns(group)


def symmetric_zero(bits: int) -> int:
    """The quantized value of 0 in a weight without zeros."""
    return 1 << (bits - 1)


def num_rows(out_features: int) -> int:
    """Rows of words: whole blocks of 16."""
    return -(-out_features // BLOCK_ROWS) * BLOCK_ROWS


def pack_words(numbers: torch.Tensor, bits: int, group: int, fill: torch.Tensor) -> torch.Tensor:
    """Quantized values [N, K] uint8 as words int16 (``num_rows``, ``num_words``), padded with ``fill``
    [N].
    """
    outputs, columns = numbers.shape
    parts, width, rows = WORD_BITS // bits, part_columns(group), num_rows(outputs)
    whole = numbers.new_zeros(rows, num_words(columns, bits, group) * parts)
    whole[:outputs] = fill[:, None]
    whole[:outputs, :columns] = numbers
    pieces = whole.view(rows, -1, parts, width).to(torch.int32)
    words = torch.zeros_like(pieces[:, :, 0])
    for index in range(parts):
        words |= pieces[:, :, index] << bits * index
    # The upper half wraps to negative. A piece's 16 rows are (g, which), its columns (t, half, which).
    pieces = words.to(torch.int16).view(rows // BLOCK_ROWS, 8, 2, -1, 4, 2, 4)
    return pieces.permute(0, 3, 5, 1, 4, 2, 6).reshape(rows, -1)


def unpacked(weight: StoredWeight) -> torch.Tensor:
    """The quantized values [N, K] uint8, in stored order."""
    rows, width = weight.values.shape[0], part_columns(weight.group)
    pieces = weight.values.reshape(rows // BLOCK_ROWS, -1, 2, 8, 4, 2, 4).permute(0, 3, 5, 1, 4, 2, 6)
    pairs = pieces.contiguous().view(torch.uint8).view(rows, -1, width, 2)  # low byte first
    if weight.bits == 8:
        parts = [pairs[..., 0], pairs[..., 1]]
    else:
        parts = [part for byte in pairs.unbind(-1) for part in (byte & 15, byte >> 4)]
    return torch.stack(parts, dim=2).view(rows, -1)[: weight.out_features, : weight.in_features]


def dequantized(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K]: computed in fp32 and rounded to ``dtype`` once; in fp64 where that is the dtype."""
    if weight.scales is None:
        return weight.values.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = unpacked(weight).to(wide)
    whole = weight.in_features // weight.group * weight.group if weight.group else 0
    for start, end in ((0, whole), (whole, weight.in_features)):  # whole groups, then the rest
        if start < end:
            group = numbers[:, start:end].unflatten(1, (-1, weight.group if end == whole else end - start))
            own = slice(start // weight.group, -(-end // weight.group)) if weight.group else slice(None)
            if weight.zeros is None:
                group -= symmetric_zero(weight.bits)
            else:
                group -= _beside(weight.zeros, own).to(wide)
            group *= _beside(weight.scales, own).to(wide)
    if weight.order is not None:
        numbers = numbers[:, weight.order.long().argsort().to(numbers.device)]
    return numbers.to(dtype)


def _beside(numbers: torch.Tensor, groups: slice) -> torch.Tensor:
    """Scales or zeros of some groups, to broadcast over columns in groups: [N, groups, 1]."""
    return numbers[:, None, None] if numbers.dim() == 1 else numbers[groups].T[..., None]


def row_pieces(weight: StoredWeight, most: int) -> Iterator[StoredWeight]:
    """Views of the weight's rows, of at most about ``most`` values each."""
    block = BLOCK_ROWS if weight.bits < 16 else 1
    rows = max(most // max(weight.in_features, 1) // block, 1) * block
    for start in range(0, weight.out_features, rows):
        own = slice(start, start + rows)
        scales, zeros = (None if t is None else t[..., own] for t in (weight.scales, weight.zeros))
        yield replace(weight, values=weight.values[own], scales=scales, zeros=zeros)


def expect_weight(weight: StoredWeight, x: torch.Tensor, out_features: int | None = None) -> None:
    """Raise unless a product of ``x`` [M, K] can read the weight."""
    columns = x.shape[1]
    outputs = weight.out_features if out_features is None else out_features
    if weight.bits == 16:
        expect("weight", weight.values, (outputs, columns), like=x)
        return
    if weight.in_features != columns:
        raise KernelArgumentError("weight has another width", seen=weight.in_features, allowed=columns)
    if weight.bits not in (4, 8):
        raise KernelArgumentError("unsupported bit width", seen=weight.bits, allowed="4, 8, 16")
    if weight.order is not None:
        raise KernelArgumentError("the weight's columns are reordered", fix="gather the input's columns")
    if weight.group and weight.group not in GROUPS:
        raise KernelArgumentError("unsupported group size", seen=weight.group, allowed=GROUPS)
    if weight.scales is None:
        raise KernelArgumentError("weight has no scales", seen=f"{weight.bits} bits")
    words = num_words(columns, weight.bits, weight.group)
    expect("weight", weight.values, (num_rows(outputs), words), like=x, dtype=torch.int16)
    shape = (-(-columns // weight.group), outputs) if weight.group else (outputs,)
    expect("scales", weight.scales, shape, like=x)
    if weight.zeros is not None:
        expect("zeros", weight.zeros, shape, like=x, dtype=torch.uint8)
