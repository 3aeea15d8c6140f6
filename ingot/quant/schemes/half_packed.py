"""Weights packed once for a CPU's products, in 16 bits, whatever the scheme that stored them.

A CPU multiplies fp32 activations by fp16 weights and adds in fp32 (PyTorch's fbgemm), so that a product of
few rows reads 2 bytes per weight. Scales in fp32 multiply the sums. No form rounds a weight:

| stored as | packed | scales |
|---|---|---|
| fp16, bf16 | the weight over a power of two | that power, per row |
| 8 or 4 bits, one scale per row | q - zero, an integer | the stored ones |
| in groups, where fp16 holds (q - zero) · scale: bf16 symmetric | as of 16 bits | a power of two per row |
| in groups of 64 columns or more | q - zero, each group by itself | the stored ones |
| in smaller groups | what fp16 holds of (q - zero) · scale, and the rest: 4 bytes | a power of two per row |

Weights of 16 bits below 2^-31 of their row's largest are within 2^-39 of it; a layer with more than one in
65,536 of them is refused. Each row of a product has the same bits whatever the other rows, and on any number
of threads.

    packed = half_packed(scheme, tensors, in_features)      # None: refused
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from ingot.kernels.weight.stored_weight import (
    PIECE,
    StoredWeight,
    dequantized,
    row_pieces,
    symmetric_zero,
    unpacked,
)
from ingot.quant.quantized_values import Quantized
from ingot.quant.schemes.linear_scheme import LinearScheme, LoadedForm, Tensors, tensor_of

Split = Literal["whole", "groups", "terms"]
ROW_SCALES = "row_scales"
_POWER = 15  # packed weights are below 2^15: fp16 holds values below 2^16
_LEAST = -110  # exponent of a row's largest weight whose power of two is a normal fp32 value
_RARE = 1 / 65536  # of weights that may be too small beside their row's largest
_WIDE_GROUP = 64  # columns of a group whose product is worth a call
_REST = 2.0**-11  # a unit of what the first term leaves
_PADDED = 16  # rows are filled up to a multiple
_OPS = torch.ops.quantized


@dataclass(frozen=True, eq=False)
class HalfPacked(LoadedForm):
    """What a CPU multiplies by in the place of another scheme's tensors.

    Tensors: of the other scheme's what is small: scales, zeros, order, ``bias``; ``row_scales`` fp32 [N]
    where the stored scales do not multiply the sums.

    Attributes:
        origin: the scheme whose weight it is.
        parts: PyTorch's packed matrices: one, one per group, or two terms.
        size: out_features and in_features.
        stored_dtype: of the weight of a dense layer.
    """

    origin: LinearScheme
    parts: tuple[Any, ...]
    split: Split
    size: tuple[int, int]
    stored_dtype: torch.dtype

    @property
    def packed_bytes(self) -> int:
        """Of the packed matrices alone."""
        return _matrix_bytes(*self.size) * (2 if self.split == "terms" else 1)

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        order, bias, scales = tensors.get("order"), tensors.get("bias"), self._scales(tensors)
        rows = x if order is None else x.index_select(-1, order)
        if self.split == "groups":
            y = self._by_groups(rows, scales)
            return y if bias is None else y.add_(bias)
        y = _product(rows, self.parts[0])
        if self.split == "terms":
            y.add_(_product(rows, self.parts[1]), alpha=_REST)
        return y.mul_(scales) if bias is None else torch.addcmul(bias, y, scales)

    def _scales(self, tensors: Tensors) -> torch.Tensor:
        """What multiplies the sums."""
        return tensor_of(tensors, ROW_SCALES if ROW_SCALES in tensors else "scales")

    def _by_groups(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        columns = rows.split(self.origin.grid.group, dim=-1)
        y = _product(columns[0].contiguous(), self.parts[0]).mul_(scales[0])
        for own, part, scale in zip(columns[1:], self.parts[1:], scales[1:], strict=True):
            y.addcmul_(_product(own.contiguous(), part), scale)
        return y

    def dequantize(self, tensors: Tensors, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        return self.origin.dequantize(self.original(tensors), in_features, dtype)

    def original(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors of the other scheme, without loss."""
        kept = {name: t for name, t in tensors.items() if t is not None and name != ROW_SCALES}
        parts = [_OPS.linear_unpack_fp16.default(part)[0] for part in self.parts]
        if self.split == "groups":
            return {"words": self._words(torch.cat(parts, dim=1), tensors)} | kept
        values = parts[0] if len(parts) == 1 else parts[0].add_(parts[1], alpha=_REST)
        scales = self._scales(tensors)[:, None]
        if self.origin.dense:
            return {"weight": values.mul_(scales).to(self.stored_dtype)} | kept
        if group := self.origin.grid.group:
            values.mul_(scales).div_(_by_column(tensor_of(tensors, "scales").float(), group, self.size[1]))
        return {"words": self._words(values, tensors)} | kept

    def _words(self, values: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Of quantized values less their zeros, rounded to the integers that they are."""
        grid, scales, zeros = self.origin.grid, tensor_of(tensors, "scales"), tensors.get("zeros")
        middle = symmetric_zero(grid.bits)
        added = middle if zeros is None else _by_column(zeros.float(), grid.group, self.size[1])
        numbers = values.nan_to_num_(0.0).add_(added).round_().to(torch.uint8)  # NaN: of a scale of 0
        found = Quantized(numbers, scales, zeros, grid.bits, grid.group, tensors.get("order"))
        return self.origin.accept(found)["words"]

    def batch_invariant(self) -> LinearScheme:
        return self

    def workspace_bytes(
        self, out_features: int, in_features: int, tokens: int, dtype: torch.dtype, *, kernels: bool
    ) -> int:
        """A gathered input, and the product of a group or a term beside the sum."""
        gathered = tokens * in_features * dtype.itemsize if self.ordered else 0
        return gathered + tokens * out_features * dtype.itemsize


def _product(rows: torch.Tensor, part: Any) -> torch.Tensor:
    y: torch.Tensor = _OPS.linear_dynamic_fp16.default(rows, part)
    return y


def _packed(weight: torch.Tensor) -> Any:
    return _OPS.linear_prepack_fp16.default(weight, None)


def _matrix_bytes(out_features: int, in_features: int) -> int:
    return -(-out_features // _PADDED) * _PADDED * in_features * 2


def half_packed_bytes(scheme: LinearScheme, out_features: int, in_features: int) -> int:
    """Bytes of a packed weight and its row scales, at most where the values decide how it is split."""
    group = 0 if scheme.dense else scheme.grid.group
    matrices = 2 if 0 < group < _WIDE_GROUP else 1
    own = 4 * out_features if scheme.dense or group else 0
    return _matrix_bytes(out_features, in_features) * matrices + own


@cache
def packs_halves() -> bool:
    """Whether this machine's PyTorch multiplies by packed weights, which a small product shows."""
    weight = torch.arange(-60.0, 60.0).view(8, 15)
    x = torch.arange(30.0).view(2, 15)
    try:
        y = _OPS.linear_dynamic_fp16.default(x, _OPS.linear_prepack_fp16.default(weight, None))
    except RuntimeError:  # no such operator for this processor
        return False
    return torch.equal(y, x @ weight.T)


def half_packed(
    scheme: LinearScheme, tensors: Tensors, in_features: int
) -> tuple[HalfPacked, dict[str, torch.Tensor]] | None:
    """A weight [N, K] packed, and the tensors that stay beside it; None where a row does not fit fp16."""
    stored = replace(scheme.stored(tensors, in_features), order=None)
    size = (stored.out_features, in_features)
    kept = {name: t for name, t in tensors.items() if t is not None and name not in ("weight", "words")}
    if scheme.dense:
        wide, scales = _over_powers(stored)
        odd = int(_rest(wide).count_nonzero())
        if odd > _RARE * wide.numel():
            return None
        packed = HalfPacked(scheme, (_packed(wide),), "whole", size, tensor_of(tensors, "weight").dtype)
        return packed, kept | {ROW_SCALES: scales}
    parts, split, powers = _quantized_parts(stored)
    packed = HalfPacked(scheme, tuple(parts), split, size, torch.float32)
    return packed, kept if powers is None else kept | {ROW_SCALES: powers}


def _quantized_parts(stored: StoredWeight) -> tuple[Sequence[Any], Split, torch.Tensor | None]:
    """Matrices of a quantized weight, how it is split, and scales [N]; None: the stored ones."""
    if not stored.group:
        return [_packed(_integers(stored))], "whole", None
    wide, scales = _over_powers(stored)
    rest = _rest(wide)
    if not rest.count_nonzero():
        return [_packed(wide)], "whole", scales
    if stored.group >= _WIDE_GROUP:
        del wide, rest
        groups = _integers(stored).split(stored.group, dim=1)
        return [_packed(own.contiguous()) for own in groups], "groups", None
    return [_packed(wide.sub_(rest)), _packed(rest.div_(_REST))], "terms", scales


def _over_powers(stored: StoredWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight fp32 [N, K] over a power of two per row, [N], which brings the row's largest below 2^15."""
    wide = torch.empty(stored.out_features, stored.in_features)
    scales, done = torch.empty(len(wide)), 0
    for piece in row_pieces(stored, PIECE):
        own = slice(done, done := done + piece.out_features)
        values = dequantized(piece, torch.float32)
        exponents = torch.frexp(values.abs().amax(1)).exponent.clamp(min=_LEAST) - _POWER
        scales[own] = torch.ldexp(torch.ones(len(values)), exponents)
        torch.div(values, scales[own, None], out=wide[own])
    return wide, scales


def _rest(wide: torch.Tensor) -> torch.Tensor:
    """What fp16 does not hold of values fp32."""
    return wide - wide.half()


def _integers(stored: StoredWeight) -> torch.Tensor:
    """Quantized values less their zeros, fp32 [N, K]."""
    wide, done = torch.empty(stored.out_features, stored.in_features), 0
    for piece in row_pieces(stored, PIECE):
        own = slice(done, done := done + piece.out_features)
        middle: torch.Tensor | int = symmetric_zero(piece.bits)
        if piece.zeros is not None:
            middle = _by_column(piece.zeros.float(), piece.group, piece.in_features)
        torch.sub(unpacked(piece).float(), middle, out=wide[own])
    return wide


def _by_column(groups: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    """Scales or zeros [N] or [groups, N], to broadcast over [N, K]."""
    return groups.T.repeat_interleave(group, dim=1)[:, :columns] if group else groups[:, None]
