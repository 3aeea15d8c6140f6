"""Rows of activations and weights in 8 bits, the two sides of an int8 product, and what they mean.

Owns both forms, the rule that rounds activations, and the exact product in plain PyTorch. Knows no kernel:
those that write or read these rows (norms, SiLU, attention, products) are held against this file.

    x8 = quantize_rows(x)                              # [M, K] → int8 and a scale a row
    y = int8_product(x8, weight, torch.float16)        # [M, N]

x = values · scales and W = values · scales. Sums of products of numbers are exact in int32 (up to 131,000
columns: 2^31 / 128²); scales multiply them once, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST = 127  # a row's own scale makes numbers of -127 … 127, the same on both sides of 0;
LEAST = -128  # with a static scale, values beyond it may reach the last one, as in compressed-tensors
_EXACT = 1024  # columns
LEAST_MAGNITUDE = 1e-10  # a row of zeros is quantized as if its largest magnitude were this


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Activations [M, K].

    Attributes:
        values: int8 [M, K], rows contiguous.
        scales: fp32. ``group`` 0: [M], one a row, or [1], one for all (static, from calibration). Else
            [M, K / group]: so many neighbouring columns of a row share one (of an attention's output: a
            head's channels).
        group: see scales; a divisor of K.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int = 0


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [N, K].

    Attributes:
        values: int8 [N, K], rows contiguous.
        scales: fp32 [N], one an output.
        temporary: a kernel before writes the values; else they are constants, which a product may ask for
            before that kernel has ended.
    """

    values: torch.Tensor
    scales: torch.Tensor
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class Int8Sums:
    """A product [M, N] whose exact sums are in S parts, not added up and not scaled.

    Attributes:
        parts: int32 [S, M, N].
        row_scales, weight_scales: those of ``Int8Rows`` without groups and of ``Int8Weight``.
    """

    parts: torch.Tensor
    row_scales: torch.Tensor
    weight_scales: torch.Tensor

    def product(self) -> torch.Tensor:
        """What the parts mean: [M, N] fp32."""
        sums = self.parts.sum(dim=0, dtype=torch.int32).float()
        return sums * self.row_scales[:, None] * self.weight_scales


def quantize_rows(x: torch.Tensor, group: int = 0, static: torch.Tensor | None = None) -> Int8Rows:
    """Activations x [M, K] of any float dtype in 8 bits; the rule that every kernel follows.

    With m the largest magnitude of a row (or of its group), the scale is m / 127 and numbers are
    x · (127 / m), rounded to the nearest, ties to even, all in fp32.

    Args:
        group: 0: a scale a row; else a scale for so many neighbouring columns.
        static: fp32 [1], a scale for all rows from calibration; what lies beyond becomes -128 or 127.
    """
    wide = x.float()
    if static is not None:
        return Int8Rows(_rounded(wide, 1.0 / static), static)
    pieces = wide.unflatten(1, (-1, group)) if group else wide[:, None]
    most = pieces.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST_MAGNITUDE)
    values = _rounded(pieces, MOST / most).flatten(1)
    # By a tensor: on a GPU PyTorch divides by a number by multiplying with its inverse, a last bit off.
    scales = (most / torch.full_like(most, MOST))[..., 0]
    return Int8Rows(values, scales if group else scales[:, 0], group)


def _rounded(wide: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return (wide * inverse).round().clamp(LEAST, MOST).to(torch.int8)


def dequantize_rows(x: Int8Rows) -> torch.Tensor:
    """What the numbers mean: [M, K] fp32."""
    if not x.group:
        return x.values.float() * x.scales[:, None]
    return (x.values.unflatten(1, (-1, x.group)).float() * x.scales[..., None]).flatten(1)


def int8_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Exact sums of products of numbers: int8 [M, K], int8 [N, K] → int32 [M, N]."""
    # fp32 holds every whole number up to 2^24: sums of 1024 products of 128² are exact in any order.
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
