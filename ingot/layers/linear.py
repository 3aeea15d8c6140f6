"""Linear layers over a quantization scheme (quant/schemes/linear_scheme.py).

Linear(4096, 12288, bias=True, ctx=ctx.at("up_proj"))(x)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ingot.kernels.weight.int4_weight import AnyInt8
from ingot.kernels.weight.stored_weight import StoredWeight
from ingot.layers.build_context import BuildContext
from ingot.layers.norm import is_wide
from ingot.quant.schemes.cpu_forms import CpuForm, cpu_form, has_cpu_form
from ingot.quant.schemes.half_packed import HalfPacked
from ingot.quant.schemes.in_panels import InPanels
from ingot.quant.schemes.linear_scheme import BlockTensors, LinearScheme, LoadedForm
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
        self.stored_names = tuple(self._parameters)

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
        scheme = Dense()
        self._hold(scheme, scheme.pack(weight, bias))
        self.stored_names = tuple(self._parameters)

    def widen_weight(self, dtype: torch.dtype) -> None:
        """Keep a dense weight in ``dtype``; other schemes stay as they are."""
        weight = self._parameters.get("weight")
        if self.scheme.dense and weight is not None and weight.dtype != dtype:
            self.register_parameter("weight", nn.Parameter(weight.to(dtype), requires_grad=False))

    def packable(self, compute: torch.dtype) -> bool:
        """Whether a CPU has a form of its own for the weight, beside activations in ``compute``."""
        weight = self._parameters.get("weight")
        stored = compute if weight is None else weight.dtype
        return has_cpu_form(self.scheme, stored, compute, self.in_features)

    def pack(self) -> bool:
        """Take a CPU's form of the weight (cpu_forms.py), and free what was stored; False: the values do not
        allow it. What was stored is still read through ``original``.
        """
        found = cpu_form(self.scheme, self._parameters, self.in_features)
        if found is not None:
            self._hold(*found)
        return found is not None

    @property
    def origin(self) -> LinearScheme:
        """The scheme that stores the weight, also of a packed one."""
        return self.scheme.origin if isinstance(self.scheme, CpuForm) else self.scheme

    def original(self) -> dict[str, torch.Tensor]:
        """The tensors of ``origin``; floats in the model's dtype."""
        if isinstance(self.scheme, CpuForm):
            return self.scheme.original(self._parameters)
        return {name: tensor for name, tensor in self._parameters.items() if tensor is not None}

    @property
    def packed_bytes(self) -> int:
        """Bytes that are held beside the parameters."""
        return self.scheme.packed_bytes if isinstance(self.scheme, LoadedForm) else 0

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """Of a dense layer's weight, as it was loaded; None: the scheme's own."""
        if isinstance(self.scheme, (HalfPacked, InPanels)):
            return self.scheme.stored_dtype if self.scheme.origin.dense else None
        weight = self._parameters.get("weight")
        return weight.dtype if self.scheme.dense and weight is not None else None

    def _hold(self, scheme: LinearScheme, tensors: Mapping[str, torch.Tensor]) -> None:
        for name in list(self._parameters):
            del self._parameters[name]
        self.scheme = scheme
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → [..., out_features]."""
        return self.scheme.apply(x, self._parameters)


def held_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, and of what its linear layers have packed."""
    packed = sum(linear.packed_bytes for linear in linears(module).values())
    return packed + sum(parameter.nbytes for parameter in module.parameters())


def linears(model: nn.Module) -> dict[str, Linear]:
    """A model's linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters by name, as schemes store them, also of packed linear layers."""
    found: dict[str, torch.Tensor] = {}
    for path, own in module.named_modules():
        tensors = own.original() if isinstance(own, Linear) else dict(own.named_parameters(recurse=False))
        found |= {f"{path}.{leaf}" if path else leaf: tensor for leaf, tensor in tensors.items()}
    return found


def all_dense(model: nn.Module) -> bool:
    """Whether every linear layer's weight is a matrix in the engine's dtype."""
    return all(linear.scheme.dense for linear in linears(model).values())


def any_rounded(model: nn.Module) -> bool:
    """Whether some linear layer quantizes its activations."""
    return any(linear.scheme.rounds for linear in linears(model).values())


def loaded_dtype(
    module: nn.Module, leaf: str, stored: torch.dtype, compute: torch.dtype, *, narrow: bool = False
) -> torch.dtype:
    """The dtype of a module's stored tensor in a model that computes in ``compute``; with ``narrow`` the
    weight of a dense layer keeps 16 bits beside activations in fp32.
    """
    if is_wide(module):
        return torch.float32
    linear = module if isinstance(module, Linear) else None
    if narrow and linear is not None and leaf == "weight" and linear.scheme.dense:
        return narrower(stored, compute)
    fixed = linear is not None and leaf in linear.scheme.fixed
    return compute if stored.is_floating_point and not fixed else stored


def narrower(stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The dtype of fewer bits, which holds a weight that was stored in one of them."""
    return stored if stored.itemsize < compute.itemsize else compute
