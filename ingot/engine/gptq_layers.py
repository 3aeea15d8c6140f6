"""GPTQ of one decoder layer after another.

Owns what GPTQ gathers of a layer and the settings it runs with. Knows no walk and no file.

    method = GptqLayers(schemes, device)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ingot.engine.calibrate import CalibratedLayer, naming
from ingot.quant.gptq import HessianSum, gptq
from ingot.quant.int4_in_int8 import Int4InInt8
from ingot.quant.rounding import Quantized, dequantize
from ingot.quant.schemes import LinearScheme
from ingot.quant.two_level import two_levels
from ingot.quant.weight_only import WeightOnly


class Unseen:
    """Nothing of an input."""

    def add(self, x: torch.Tensor) -> None:
        """Forget the tokens."""
        return


class GptqLayers:
    """Numbers by the inputs' products.

    A layer sees what the layers before it give once quantized, so that it makes up for their errors. Columns
    are taken by the size of their inputs, with scales of the weight as it is, in 4 bits of ranges that the
    inputs weigh (gptq.py: ``act_order``, ``static_groups``, ``clip``). Of w4a8 the levels are those of the
    weight as it is, and GPTQ takes numbers of the grid that they make.
    """

    def __init__(self, schemes: Mapping[str, LinearScheme], device: torch.device) -> None:
        self._schemes = schemes
        self._device = device

    def statistic(self, name: str, in_features: int) -> HessianSum | Unseen:
        """The sum of x·xᵀ of what narrow layers read."""
        return HessianSum(in_features, self._device) if name in self._schemes else Unseen()

    def choose(self, layer: CalibratedLayer[HessianSum | Unseen]) -> Iterator[tuple[str, Quantized]]:
        """The numbers of each narrow linear layer; layers after this one see them."""
        for name, seen in layer.inputs.items():
            if isinstance(seen, HessianSum):
                yield name, self.numbers(layer, name, seen)

    def numbers(self, layer: CalibratedLayer[Any], name: str, seen: HessianSum) -> Quantized:
        """Those of one linear layer; layers after this one see them."""
        scheme, weight = self._schemes[name], layer.weight(f"{name}.weight")
        with naming(name):
            found = _chosen(scheme, weight, seen.mean())
        layer.replace(f"{name}.weight", dequantize(found))
        return found


def _chosen(scheme: LinearScheme, weight: torch.Tensor, hessian: torch.Tensor) -> Quantized:
    """The numbers of one weight [N, K] by its inputs' mean of x·xᵀ."""
    if isinstance(scheme, Int4InInt8):
        levels = two_levels(weight, scheme.group, hessian.diagonal())
        found = gptq(
            weight,
            hessian,
            4,
            scheme.group,
            symmetric=False,
            act_order=True,
            scale_dtype=torch.float32,
            grid=levels.grid(),
        ).quantized
        return levels.quantized(found.numbers, scheme.group)
    assert isinstance(scheme, WeightOnly), scheme.name
    return gptq(
        weight,
        hessian,
        scheme.bits,
        scheme.group,
        symmetric=scheme.symmetric,
        act_order=True,
        static_groups=True,
        clip=scheme.bits == 4,
        scale_dtype=weight.dtype,
    ).quantized
