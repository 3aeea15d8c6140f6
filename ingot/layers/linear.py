"""Linear layers over a scheme.

Owns the module that holds one linear layer's stored tensors. Knows no number format (``quant/schemes.py``
does) and no model.

    Linear(4096, 12288, bias=True, ctx=ctx.at("up_proj"))(x)
"""

from __future__ import annotations

import torch
from torch import nn

from ingot.kernels.stored_weight import StoredWeight
from ingot.layers.context import BuildContext
from ingot.quant.schemes import is_dense, takes_small_products


class Linear(nn.Module):
    """y = x · Wᵀ + b through the scheme that the context has for this layer's name."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, ctx: BuildContext) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.small_tiles = ctx.product_tiles("small_linear", n=out_features, k=in_features)
        self.scheme = ctx.scheme
        for name, tensor in self.scheme.layout(out_features, in_features, bias, ctx.dtype).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of weight and bias before packing: what a weight map must deliver."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        if self.has_bias:
            shapes["bias"] = (self.out_features,)
        return shapes

    def stored(self) -> StoredWeight:
        """The weight as the small kernels read it."""
        return self.scheme.stored(self._parameters, self.in_features)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [out_features, in_features] that the layer multiplies by, without a kernel."""
        return self.scheme.dequantize(self._parameters, self.in_features, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → [..., out_features]."""
        return self.scheme.apply(x, self._parameters)


def linears(model: nn.Module) -> dict[str, Linear]:
    """A model's linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def all_dense(model: nn.Module) -> bool:
    """Whether every linear layer's weight is a matrix in the engine's dtype."""
    return all(is_dense(linear.scheme) for linear in linears(model).values())


def all_small(model: nn.Module) -> bool:
    """Whether the small kernels can multiply by every linear layer's weight."""
    return all(takes_small_products(linear.scheme) for linear in linears(model).values())
