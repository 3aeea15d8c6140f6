"""Linear layers over a quantization scheme (quant/schemes/linear_scheme.py).

Linear(4096, 12288, bias=True, ctx=ctx.at("up_proj"))(x)
"""

from __future__ import annotations

import torch
from torch import nn

from ingot.kernels.weight.int4_weight import AnyInt8
from ingot.kernels.weight.stored_weight import StoredWeight
from ingot.layers.build_context import BuildContext
from ingot.layers.norm import is_wide
from ingot.quant.schemes.linear_scheme import BlockTensors, LinearScheme
from ingot.quant.schemes.scheme_registry import Dense


class Linear(nn.Module):
    """y = x · Wᵀ + b by the scheme that the context has for this layer's name.

    ``input_group``: channels that are computed together (attention's heads), with their own scale if
    activations are quantized; 0: all. ``free_order``: a product computes the input's channels, so a build may
    reorder them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        ctx: BuildContext,
        input_group: int = 0,
        free_order: bool = False,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.small_tiles = ctx.product_tiles("small_linear", n=out_features, k=in_features)
        self.scheme: LinearScheme = ctx.scheme(input_group, free_order=free_order)
        for name, tensor in self.scheme.layout(out_features, in_features, bias, ctx.dtype).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of weight and bias before packing: what a weight map must deliver."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        if self.has_bias:
            shapes["bias"] = (self.out_features,)
        return shapes

    def stored(self) -> StoredWeight:
        """The weight as the small kernels read it; the scheme's form is ``dense``."""
        return self.scheme.stored(self._parameters, self.in_features)

    def unpacks_prompts(self) -> bool:
        """Whether more than a few hundred rows are multiplied by the values as they are stored."""
        return self.scheme.unpacks_prompts(self._parameters, self.in_features)

    def int8_weight(self, rows: int) -> AnyInt8:
        """The weight as int8 products of so many rows read it; the scheme's form is ``int8``."""
        return self.scheme.int8_weight(self._parameters, self.in_features, rows)

    def in_blocks(self) -> BlockTensors:
        """What products by blocks read; the scheme's form is ``blocks``."""
        return self.scheme.block_tensors(self._parameters)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [out_features, in_features], without a kernel."""
        return self.scheme.dequantize(self._parameters, self.in_features, dtype)

    def widen(self) -> None:
        """Become dense in fp32; a dense layer stays as it is."""
        if self.scheme.dense:
            return
        weight, bias = self.dequantized(torch.float32), self._parameters.get("bias")
        for name in list(self._parameters):
            del self._parameters[name]
        self.scheme = Dense()
        for name, tensor in self.scheme.pack(weight, bias).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → [..., out_features]."""
        return self.scheme.apply(x, self._parameters)


def linears(model: nn.Module) -> dict[str, Linear]:
    """A model's linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def all_dense(model: nn.Module) -> bool:
    """Whether every linear layer's weight is a matrix in the engine's dtype."""
    return all(linear.scheme.dense for linear in linears(model).values())


def any_rounded(model: nn.Module) -> bool:
    """Whether some linear layer quantizes its activations."""
    return any(linear.scheme.rounds for linear in linears(model).values())


def loaded_dtype(module: nn.Module, leaf: str, stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The dtype of a module's stored tensor in a model that computes in ``compute``."""
    if is_wide(module):
        return torch.float32
    fixed = isinstance(module, Linear) and leaf in module.scheme.fixed
    return compute if stored.is_floating_point and not fixed else stored
