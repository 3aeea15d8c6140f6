"""Activations and weights in 8 bits, the rule that quantizes activations, and the product in PyTorch.

x = values · scales and W = values · scales, with values in int8 or in e4m3 (1 sign, 4 exponent, 3 fraction
bits; "FP8 formats for deep learning", Micikevicius et al., 2022). Sums of products of int8 are exact in int32
(up to 131,000 columns: 2^31 / 128²), those of e4m3 are fp32; scales multiply them once, in fp32. Kernels that
write or read such rows are tested against this file.

    x8 = quantize_rows(x)                              # [M, K] → int8 and one scale per row
    x8 = quantize_rows(x, dtype=E4M3)                  # e4m3: the largest magnitude becomes 448
    y = int8_product(x8, weight, torch.float16)        # [M, N]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MOST = 448.0  # the largest magnitude of e4m3
MOST = 127  # of int8: a row's own scale makes values -127 … 127, symmetric around 0;
LEAST = -128  # with a static scale they are clamped at -128, as in compressed-tensors
_EXACT = 1024  # columns
BLOCK = 128  # rows and columns of a weight that share a scale, and columns of its input, if not whole rows do
LEAST_MAGNITUDE = 1e-10  # a row of zeros is quantized as if its largest magnitude were this


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Activations [M, K].

    Attributes:
        values: int8 or e4m3 [M, K], rows contiguous.
        scales: fp32 [M], or [1] for all rows (static, from calibration); with groups [M, K / group].
        group: neighbouring columns of a row that share a scale, a divisor of K; 0: the whole row.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int = 0


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [N, K].

    Attributes:
        values: int8 or e4m3 [N, K], rows contiguous.
        scales: fp32 [N], one per output; or [⌈N / 128⌉, K / 128], one per block, for rows in groups of 128.
        temporary: the previous kernel writes the values; otherwise they are constants, which a product may
            load before that kernel has ended.
    """

    values: torch.Tensor
    scales: torch.Tensor
    temporary: bool = False

    @property
    def in_blocks(self) -> bool:
        """Whether blocks of 128 rows and columns have scales."""
        return self.scales.dim() == 2

    def piece(self, rows: slice) -> Int8Weight:
        """Some rows; of a weight in blocks ``rows`` starts at one."""
        own = slice(rows.start // BLOCK, -(-rows.stop // BLOCK)) if self.in_blocks else rows
        return Int8Weight(self.values[rows], self.scales[own])

    def beside(self) -> torch.Tensor:
        """The scales as they stand beside the values: [N, 1] or [N, K]."""
        if not self.in_blocks:
            return self.scales[:, None]
        rows, columns = (torch.arange(size, device=self.scales.device) // BLOCK for size in self.values.shape)
        return self.scales[rows[:, None], columns]


@dataclass(frozen=True, slots=True)
class Int8Sums:
    """A product [M, N] as exact sums in S parts, not added up and not scaled.

    Attributes:
        parts: int32 [S, M, N].
        row_scales, weight_scales: those of ``Int8Rows`` without groups and of ``Int8Weight``.
    """

    parts: torch.Tensor
    row_scales: torch.Tensor
    weight_scales: torch.Tensor

    def product(self) -> torch.Tensor:
        """The product [M, N] fp32."""
        sums = self.parts.sum(dim=0, dtype=torch.int32).float()
        return sums * self.row_scales[:, None] * self.weight_scales


def quantize_rows(
    x: torch.Tensor, group: int = 0, static: torch.Tensor | None = None, dtype: torch.dtype = torch.int8
) -> Int8Rows:
    """Quantize activations x [M, K] of any float dtype; the rule that every kernel follows.

    With m the largest magnitude of a row (or group), the scale is m / 127 and values are x · (1 / m · 127),
    rounded to the nearest, ties to even; each operation rounds to fp32. In a ``dtype`` of e4m3 448 takes
    the place of 127. With ``static``, fp32 [1], values are x / static, clamped at -128 … 127, or -448 … 448.
    """
    wide = x.float()
    if static is not None:
        return Int8Rows(_rounded(wide, 1.0 / static, dtype), static)
    highest = E4M3_MOST if dtype == E4M3 else MOST
    pieces = wide.unflatten(1, (-1, group)) if group else wide
    most = pieces.abs().amax(dim=-1, keepdim=True).clamp_(min=LEAST_MAGNITUDE)
    values = _rounded(pieces, highest / most, dtype)
    # By a tensor: on a GPU PyTorch divides by a scalar by multiplying with its inverse, a last bit off.
    scales = (most / torch.full_like(most, highest))[..., 0]
    return Int8Rows(values.flatten(1) if group else values, scales, group)


def _rounded(wide: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == E4M3:  # the scale of a row that is not finite says so; no value does
        return (wide * inverse).nan_to_num_(nan=0.0).clamp_(-E4M3_MOST, E4M3_MOST).to(dtype)
    return (wide * inverse).round_().clamp_(LEAST, MOST).to(torch.int8)


def dequantize_rows(x: Int8Rows) -> torch.Tensor:
    """The activations [M, K] fp32."""
    if not x.group:
        return x.values.float() * x.scales[:, None]
    return (x.values.unflatten(1, (-1, x.group)).float() * x.scales[..., None]).flatten(1)


def int8_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sums of products: int8 [M, K], int8 [N, K] → exact, int32 [M, N]; of e4m3 fp32."""
    # fp32 holds every integer up to 2^24: sums of 1024 products of 128² are exact in any order.
    kind = torch.float32 if x.dtype == E4M3 else torch.int32
    sums = torch.zeros(x.shape[0], weight.shape[0], dtype=kind, device=x.device)
    for start in range(0, x.shape[1], _EXACT):
        a, b = x[:, start : start + _EXACT].float(), weight[:, start : start + _EXACT].float()
        sums += (a @ b.T).to(kind)
    return sums


def int8_product(
    x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x · Wᵀ + bias in ``dtype`` [M, N]: sums, scaled in fp32, rounded once."""
    if x.group:
        sums = torch.zeros(len(x.values), len(weight.values), device=x.values.device)
        for i, c in enumerate(range(0, x.values.shape[1], x.group)):  # ascending: one order for any row
            part = int8_sums(x.values[:, c : c + x.group], weight.values[:, c : c + x.group])
            part = part.float() * x.scales[:, i, None]
            if weight.in_blocks:
                part = part * weight.scales[:, i].repeat_interleave(BLOCK)[: len(weight.values)]
            sums = sums + part
    else:
        sums = int8_sums(x.values, weight.values).float() * x.scales[:, None]
    y = sums if weight.in_blocks else sums * weight.scales
    return (y if bias is None else y + bias.float()).to(dtype)
