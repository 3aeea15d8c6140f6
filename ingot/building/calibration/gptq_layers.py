"""GPTQ of one layer after another, with the settings of each scheme (``compensated``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ingot.building.calibration.calibrate import CalibratedLayer, Statistic, naming
from ingot.building.calibration.layer_method import LayerMethod
from ingot.engine.assembly import ChosenValues
from ingot.quant.methods.gptq import HessianSum
from ingot.quant.methods.rounding import dequantize


class GptqLayers(LayerMethod):
    """Values by the inputs' products: a layer makes up for the errors of the layers before it."""

    name = "gptq"

    def statistic(self, name: str, in_features: int) -> Statistic | None:
        return HessianSum(in_features, self.device) if name in self.schemes else None

    def choose(self, layer: CalibratedLayer[Any]) -> Iterator[tuple[str, ChosenValues]]:
        for name in filter(self.schemes.__contains__, layer.inputs):
            yield name, self.choice(layer, name)

    def choice(self, layer: CalibratedLayer[Any], name: str) -> ChosenValues:
        """The values of one linear layer; layers after this one see them."""
        with naming(name):
            hessian = layer.inputs[name].mean()
            found = self.schemes[name].compensated(layer.weight(f"{name}.weight"), hessian)
        layer.replace(f"{name}.weight", dequantize(found))
        self.report_layer(name)
        return ChosenValues(found)
