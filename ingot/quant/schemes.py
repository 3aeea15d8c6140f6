"""Linear schemes: what a linear layer stores and how it multiplies.

Owns the seam between a linear layer and its number format. Knows no model: a scheme sees one weight at a
time.

    scheme = make_scheme(QuantConfig())
    tensors = scheme.pack(weight, bias)          # at build
    y = scheme.apply(x, tensors)                 # at run
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from ingot.config.quant import QuantConfig
from ingot.kernels.invariant_linear import invariant_linear

Shape = tuple[int, ...]


class LinearScheme(Protocol):
    """Stores y = x · Wᵀ + b, W [out_features, in_features], as named tensors and computes it from them."""

    name: str

    def layout(
        self, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Empty tensors (on the current default device) of the stored shapes and dtypes."""
        ...

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The stored form of one layer's weights, in the order of ``layout``."""
        ...

    def apply(self, x: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """y [..., out_features] for x [..., in_features]."""
        ...

    def batch_invariant(self) -> LinearScheme:
        """The scheme that computes from the same tensors so that no row's bits depend on other rows."""
        ...


class Dense:
    """Weights as they are, in the engine's dtype."""

    name = "none"

    def layout(
        self, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """``weight`` [out_features, in_features] and, with a bias, ``bias`` [out_features]."""
        tensors = {"weight": torch.empty(out_features, in_features, dtype=dtype)}
        if bias:
            tensors["bias"] = torch.empty(out_features, dtype=dtype)
        return tensors

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The tensors themselves."""
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def apply(self, x: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """x · Wᵀ + b by the matrix library."""
        weight = tensors["weight"]
        assert weight is not None
        return F.linear(x, weight, tensors.get("bias"))

    def batch_invariant(self) -> InvariantDense:
        """The same weights, multiplied by a kernel of our own."""
        return InvariantDense()


class InvariantDense:
    """Weights as they are; y's rows have the same bits in any company, at some cost in speed."""

    name = Dense.name

    def layout(
        self, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """As :class:`Dense`."""
        return Dense().layout(out_features, in_features, bias, dtype)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """As :class:`Dense`."""
        return Dense().pack(weight, bias)

    def apply(self, x: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """x · Wᵀ + b, x [T, in_features]."""
        weight = tensors["weight"]
        assert weight is not None
        return invariant_linear(x, weight, tensors.get("bias"))

    def batch_invariant(self) -> InvariantDense:
        """Itself."""
        return self


def make_scheme(config: QuantConfig) -> LinearScheme:
    """The scheme that a config names."""
    return {"none": Dense}[config.scheme]()
