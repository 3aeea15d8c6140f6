"""A quantization scheme from outside the package: 8 bits, a scale kept as mantissa and exponent.

Covers what it stores and how it multiplies; how a proof reads it is dummy_reading.py's.

    register()
    build(checkpoint, engine, quant="dummy8")
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ingot.config.quantization.scheme_table import SchemeInfo
from ingot.kernels.product.invariant_linear import invariant_linear
from ingot.quant.methods.rounding import quantize
from ingot.quant.quantized_values import Quantized, Values
from ingot.quant.schemes.linear_scheme import LinearScheme, Tensors
from ingot.quant.schemes.scheme_registry import register_scheme

NAME = "dummy8"


class Dummy8(LinearScheme):
    """W = q · mantissa · 2^exponent.

    Tensors: ``values`` int8 [N, K], ``mantissas`` fp32 [N], ``exponents`` int8 [N], ``bias`` [N] where there
    is one.
    """

    name = NAME
    fixed = frozenset({"mantissas"})
    packs_fp32 = True

    def _layout(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            "values": torch.empty(out_features, in_features, dtype=torch.int8),
            "mantissas": torch.empty(out_features, dtype=torch.float32),
            "exponents": torch.empty(out_features, dtype=torch.int8),
        }

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """The values nearest to a weight [N, K]."""
        return quantize(weight, 8, scale_dtype=torch.float32)

    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        mantissas, exponents = torch.frexp(found.scales)
        return {"values": found.values, "mantissas": mantissas, "exponents": exponents.to(torch.int8)}

    def dequantize(self, tensors: Tensors, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        """W [N, K] in ``dtype``."""
        values, mantissas, exponents = (tensors[name] for name in ("values", "mantissas", "exponents"))
        assert values is not None
        assert mantissas is not None
        assert exponents is not None
        scales = torch.ldexp(mantissas.float(), exponents.int())
        wide = torch.promote_types(dtype, torch.float32)
        return (values.to(wide) * scales.to(wide)[:, None]).to(dtype)

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """x · Wᵀ + b for x [..., K]."""
        return F.linear(x, self.dequantize(tensors, x.shape[-1], x.dtype), tensors.get("bias"))

    def batch_invariant(self) -> LinearScheme:
        """The same tensors, multiplied so that no row depends on another."""
        return InvariantDummy8()


class InvariantDummy8(Dummy8):
    """Widened in every step for the invariant product."""

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """x · Wᵀ + b, x [T, K]."""
        return invariant_linear(x, self.dequantize(tensors, x.shape[-1], x.dtype), tensors.get("bias"))


def register() -> None:
    """Make the scheme known by its name."""
    register_scheme(NAME, SchemeInfo(8, wider="none"), lambda config, place: Dummy8())
