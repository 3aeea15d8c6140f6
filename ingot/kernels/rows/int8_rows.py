"""Activations and weights in 8 bits, the rule that quantizes activations, and the exact product in PyTorch.

x = values · scales and W = values · scales. Sums of products of int8 are exact in int32 (up to 131,000
columns: 2^31 / 128²); scales multiply them once, in fp32. Kernels that write or read such rows are tested
against this file.

    x8 = quantize_rows(x)                              # [M, K] → int8 and one scale per row
    y = int8_product(x8, weight, torch.float16)        # [M, N]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST = 127  # a row's own scale makes values -127 … 127, symmetric around 0;
LEAST = -128  # with a static scale they are clamped at -128, as in compressed-tensors
_EXACT = 1024  # columns
LEAST_MAGNITUDE = 1e-10  # a row of zeros is quantized as if its largest magnitude were this


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Activations [M, K].

    Attributes:
        values: int8 [M, K], rows contiguous.
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
        values: int8 [N, K], rows contiguous.
        scales: fp32 [N], one per output.
        temporary: the previous kernel writes the values; otherwise they are constants, which a product may
            load before that kernel has ended.
    """

    values: torch.Tensor
    scales: torch.Tensor
    temporary: bool = False


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


def quantize_rows(x: torch.Tensor, group: int = 0, static: torch.Tensor | None = None) -> Int8Rows:
    """Quantize activations x [M, K] of any float dtype; the rule that every kernel follows.

    With m the largest magnitude of a row (or group), the scale is m / 127 and values are x · (127 / m),
    rounded to the nearest, ties to even, in fp32. With ``static``, fp32 [1], they are x / static, clamped at
    -128 … 127.
    """
    wide = x.float()
    if static is not None:
        return Int8Rows(_rounded(wide, 1.0 / static), static)
    pieces = wide.unflatten(1, (-1, group)) if group else wide[:, None]
    most = pieces.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST_MAGNITUDE)
    values = _rounded(pieces, MOST / most).flatten(1)
    # By a tensor: on a GPU PyTorch divides by a scalar by multiplying with its inverse, a last bit off.
    scales = (most / torch.full_like(most, MOST))[..., 0]
    return Int8Rows(values, scales if group else scales[:, 0], group)


def _rounded(wide: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return (wide * inverse).round().clamp(LEAST, MOST).to(torch.int8)


def dequantize_rows(x: Int8Rows) -> torch.Tensor:
    """The activations [M, K] fp32."""
    if not x.group:
        return x.values.float() * x.scales[:, None]
    return (x.values.unflatten(1, (-1, x.group)).float() * x.scales[..., None]).flatten(1)


def int8_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Exact sums of products: int8 [M, K], int8 [N, K] → int32 [M, N]."""
    # fp32 holds every integer up to 2^24: sums of 1024 products of 128² are exact in any order.
    sums = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], _EXACT):
        a, b = x[:, start : start + _EXACT].float(), weight[:, start : start + _EXACT].float()
        sums += (a @ b.T).to(torch.int32)
    return sums


def int8_product(
    x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x · Wᵀ + bias in ``dtype`` [M, N]: exact sums, scaled in fp32, rounded once."""
    if x.group:
        sums = torch.zeros(len(x.values), len(weight.values), device=x.values.device)
        for i, c in enumerate(range(0, x.values.shape[1], x.group)):  # ascending: one order for any row
            part = int8_sums(x.values[:, c : c + x.group], weight.values[:, c : c + x.group])
            sums = sums + part.float() * x.scales[:, i, None]
    else:
        sums = int8_sums(x.values, weight.values).float() * x.scales[:, None]
    y = sums * weight.scales
    return (y if bias is None else y + bias.float()).to(dtype)
