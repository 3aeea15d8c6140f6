"""Linear layers over a scheme.

Owns the module that holds one linear layer's stored tensors. Knows no number format (``quant/schemes.py``
does) and no model.

    Linear(4096, 12288, bias=True, ctx=ctx)(x)
"""

from __future__ import annotations

import torch
from torch import nn

from ingot.config.quant import QuantConfig
from ingot.layers.context import BuildContext
from ingot.quant.schemes import Dense


def quant_of(model: nn.Module) -> QuantConfig:
    """The scheme of a model's linear layers, those apart that are kept out of quantization."""
    schemes = {m.scheme.name for m in model.modules() if isinstance(m, Linear)} - {Dense.name}
    return QuantConfig(scheme=min(schemes, default=Dense.name))


class Linear(nn.Module):
    """y = x · Wᵀ + b through the context's scheme; ``dense=True`` keeps this layer out of quantization."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, ctx: BuildContext, dense: bool = False
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.small_tiles = ctx.plan.table("small_linear", n=out_features, k=in_features)
        self.scheme = Dense() if dense else ctx.scheme
        for name, tensor in self.scheme.layout(out_features, in_features, bias, ctx.dtype).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of weight and bias before packing: what a weight map must deliver."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        if self.has_bias:
            shapes["bias"] = (self.out_features,)
        return shapes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → [..., out_features]."""
        return self.scheme.apply(x, self._parameters)
