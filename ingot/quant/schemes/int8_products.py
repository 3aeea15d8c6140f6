"""Linear layers whose products are of 8 bits on both sides, however the weight is stored.

Sums of products of int8 are exact, so that a row's outputs depend on that row alone, in any order
and with any other rows: such a scheme is its own batch-invariant form.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ingot.kernels.activation.silu_mul_int8 import quantized
from ingot.kernels.kernel_checks import runs_on_gpu
from ingot.kernels.product.int8.cpu_product import SPREAD, cpu_int8_product
from ingot.kernels.product.int8.int8_linear import int8_linear
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, dequantize_rows
from ingot.kernels.weight.int4_weight import AnyInt8, as_int8
from ingot.quant.plain_rows import rounded_e4m3, rounded_rows
from ingot.quant.schemes.linear_scheme import InputForm, LinearScheme, Tensors

_ROUNDING = 3  # copies of an input that rounding it on a CPU holds


class Int8Products(LinearScheme):
    """y = x · Wᵀ + b with x in 8 bits, by rows or by one scale, and W in 8 bits with a scale per row."""

    form: ClassVar[InputForm] = "int8"
    packs_fp32: ClassVar[bool] = True

    def dequantize(self, tensors: Tensors, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        weight = self.plain_weight(tensors, in_features)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (weight.values.to(wide) * weight.beside().to(wide)).to(dtype)

    def dequantize_input(
        self, rows: Int8Rows, tensors: Tensors, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = Int8Rows(rows.values, rows.scales.to(like), rows.group)
        scales = wide.scales.repeat_interleave(rows.group, dim=1) if rows.group else wide.scales[:, None]
        return dequantize_rows(wide).to(like), scales

    def quantize_input(self, x: torch.Tensor, tensors: Tensors) -> Int8Rows:
        if self.static:
            return quantized(x, static=tensors["input_scale"], dtype=self.input_dtype)
        return quantized(x, self.input_group, dtype=self.input_dtype)

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        rows = self.quantize_input(x.reshape(-1, x.shape[-1]), tensors)
        weight = self.int8_weight(tensors, x.shape[-1], len(rows.values))
        y = multiply(rows, weight, x.dtype, self._added(tensors))
        return y.view(*x.shape[:-1], -1)

    def _added(self, tensors: Tensors) -> torch.Tensor | None:
        """What is added to the products' sums, [N]."""
        return tensors.get("bias")

    def rounded(self, x: torch.Tensor, tensors: Tensors, *, flips: bool = False) -> torch.Tensor:
        if self.input_dtype == E4M3:
            return rounded_e4m3(x, self.input_group, flips=flips)
        return rounded_rows(x, self.input_group, tensors.get("input_scale"), flips=flips)

    def workspace_bytes(
        self, out_features: int, in_features: int, tokens: int, dtype: torch.dtype, *, kernels: bool
    ) -> int:
        """Of the input in 8 bits, with its scales, and on a CPU of a product's temporaries."""
        own = self._input_bytes(in_features, tokens) + self.expanded_bytes(out_features, in_features, kernels)
        if kernels:
            return own
        sums = 2 * tokens * out_features * 4 + (2 * SPREAD * out_features * 4 if self.input_group else 0)
        return max(own + sums, own + _ROUNDING * tokens * in_features * 4)

    def _input_bytes(self, in_features: int, tokens: int) -> int:
        scales = in_features // self.input_group if self.input_group else 1
        return tokens * (in_features + scales * 4)

    def expanded_bytes(self, out_features: int, in_features: int, kernels: bool) -> int:
        """Of a weight that is written as int8 for each product."""
        return 0

    def batch_invariant(self) -> LinearScheme:
        return self


def multiply(x: Int8Rows, weight: AnyInt8, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """x · Wᵀ + b [M, N]."""
    if runs_on_gpu(x.values):
        return int8_linear(x, weight, dtype, bias)
    return cpu_int8_product(x, as_int8(weight), dtype, bias)
