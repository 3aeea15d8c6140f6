"""The schemes by name; a scheme in fewer bits has a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.scheme_table import (
    BLOCKS,
    GROUPS,
    METHODS,
    SCHEMES,
    SchemeInfo,
    block_schemes,
    weight_only_schemes,
)
from ingot.kernels.product.invariant_linear import invariant_linear
from ingot.kernels.weight.stored_weight import StoredWeight
from ingot.quant.quantized_values import Values
from ingot.quant.schemes.fp8_both import Fp8Both
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.int8_blocks import Int8Blocks
from ingot.quant.schemes.int8_both import Int8Both
from ingot.quant.schemes.linear_scheme import LinearScheme, Tensors, tensor_of
from ingot.quant.schemes.weight_only import WeightOnly


class Dense(LinearScheme):
    """Weights as they are, in the engine's dtype: ``weight`` [N, K]."""

    name = "none"
    dense: ClassVar[bool] = True
    small_products = True

    def _layout(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"weight": torch.empty(out_features, in_features, dtype=dtype)}

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, input_scale: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def quantize(self, weight: torch.Tensor) -> Values:
        self._lacks("quantized values")

    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        self._lacks("quantized values")

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        weight = tensor_of(tensors, "weight")
        return F.linear(x, weight if weight.dtype == x.dtype else weight.to(x.dtype), tensors.get("bias"))

    def stored(self, tensors: Tensors, in_features: int) -> StoredWeight:
        return StoredWeight(tensor_of(tensors, "weight"), in_features)

    def dequantize(self, tensors: Tensors, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        return tensor_of(tensors, "weight").to(dtype)

    def batch_invariant(self) -> LinearScheme:
        """The same weights, multiplied by a kernel of our own."""
        return InvariantDense()


class InvariantDense(Dense):
    """The same weights; y's rows have the same bits whatever the other rows, at some cost in speed."""

    dense: ClassVar[bool] = False
    small_products = False

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        return invariant_linear(x, tensor_of(tensors, "weight"), tensors.get("bias"))

    def batch_invariant(self) -> LinearScheme:
        return self


@dataclass(frozen=True, slots=True)
class InputPlace:
    """What a scheme may need to know of its layer's input.

    Attributes:
        group: neighbouring channels that share a scale where activations are rounded by the scales that they
            come with; 0: all.
        free_order: a product makes the input, whose channels a build may put in any order.
    """

    group: int = 0
    free_order: bool = False


Maker = Callable[[QuantConfig, InputPlace], LinearScheme]


def register_scheme(name: str, info: SchemeInfo, make: Maker) -> None:
    """Add a scheme: ``info`` in ``SCHEMES``, ``make`` for its linear layers. For proofs, its class also needs
    a plain reading (building/source/plain_readings.py).

    Raises ValueError where the name is taken, or ``info`` names what does not exist.
    """
    if name in SCHEMES:
        raise ValueError(f"a scheme named {name} is registered already")
    unknown = {*info.method} - {*METHODS} | {*info.group} - {*GROUPS} | {info.wider} - {"", *SCHEMES}
    if unknown:
        raise ValueError(f"scheme {name}: unknown methods, groups or wider scheme {unknown}")
    SCHEMES[name] = info
    MAKERS[name] = make


def make_scheme(config: QuantConfig, input_group: int = 0, *, free_order: bool = False) -> LinearScheme:
    """The scheme of one linear layer, from ``QuantConfig.at`` its name; the others are ``InputPlace``'s."""
    return MAKERS[config.scheme](config, InputPlace(input_group, free_order))


def _weight_only(config: QuantConfig, place: InputPlace) -> LinearScheme:
    assert config.group is not None
    bits = SCHEMES[config.scheme].weight_bits
    return WeightOnly(bits, config.group, bool(config.symmetric), config.act_order)


def _int8_both(config: QuantConfig, place: InputPlace) -> LinearScheme:
    static, per_tensor = config.activations == "static", config.weight_scales == "tensor"
    return Int8Both(static, per_tensor, 0 if static else place.group)


def _fp8_both(config: QuantConfig, place: InputPlace) -> LinearScheme:
    return Fp8Both(config.weight_scales == "tensor", config.weight_scales == BLOCKS)


def _int4_in_int8(config: QuantConfig, place: InputPlace) -> LinearScheme:
    assert config.group is not None
    return Int4InInt8(config.group, place.group)


def _int8_blocks(config: QuantConfig, place: InputPlace) -> LinearScheme:
    assert config.group
    info = SCHEMES[config.scheme]
    return Int8Blocks(info.weight_bits, info.input_bits, config.group, ordered=not place.free_order)


MAKERS: dict[str, Maker] = {
    "none": lambda config, place: Dense(),
    "w8a8": _int8_both,
    "w8a8-fp8": _fp8_both,
    "w4a8": _int4_in_int8,
    **dict.fromkeys(weight_only_schemes(), _weight_only),
    **dict.fromkeys(block_schemes(), _int8_blocks),
}
