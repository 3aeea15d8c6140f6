"""AWQ of one layer after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ingot.building.calibration.calibrate import CalibratedLayer, Statistic, naming
from ingot.building.calibration.layer_method import LayerMethod
from ingot.building.calibration.rescaling import fold, rescaling_sites, value_rows_of
from ingot.engine.assembly import ChosenValues
from ingot.quant.methods.activation_statistics import SAMPLE_ROWS, InputStatistics
from ingot.quant.methods.awq import clip_limits, clipped, search_scales
from ingot.quant.methods.rounding import dequantize, quantize
from ingot.quant.quantized_values import Quantized


class AwqLayers(LayerMethod):
    """Values by rounding, of weights whose large inputs were scaled up and whose ranges were cut.

    The scales of an input are folded into what makes it (rescaling.py); one without a site keeps its own.
    4-bit ranges are cut where a sample of the inputs says so, except for queries and keys.
    """

    name = "awq"

    def statistic(self, name: str, in_features: int) -> Statistic | None:
        if name not in self.schemes:
            return None
        return InputStatistics.of(in_features, self.device, sample=SAMPLE_ROWS)

    def choose(self, layer: CalibratedLayer[Any]) -> Iterator[tuple[str, ChosenValues]]:
        """The values of each narrow linear layer, once all scales of the layer are folded."""
        sampled = {name: seen.sample.x for name, seen in layer.inputs.items() if name in self.schemes}
        for site in rescaling_sites(self.config, layer.name):
            if site.reader not in sampled:
                continue
            with naming(site.reader):
                found = search_scales(
                    [layer.weight(f"{site.reader}.weight")],
                    sampled[site.reader],
                    lambda w, name=site.reader: dequantize(self._rounded(name, w)),  # type: ignore[misc]
                    group=self.schemes[site.reader].grid.group,
                    magnitude=layer.inputs[site.reader].ranges.mean_abs(),
                    classes=site.classes,
                )
                if found.exponent:
                    fold(site, found.scales, layer)
                    sampled[site.reader] = sampled[site.reader] / found.scales
        for name, x in sampled.items():
            with naming(name):
                values = self._rounded(name, self._narrowed(name, layer.weight(f"{name}.weight"), x))
                layer.replace(f"{name}.weight", dequantize(values))
            self.report_layer(name)
            yield name, ChosenValues(values)

    def _rounded(self, name: str, weight: torch.Tensor) -> Quantized:
        own = self.schemes[name].grid
        return quantize(weight, own.bits, own.group, symmetric=own.symmetric, scale_dtype=self.half(name))

    def _narrowed(self, name: str, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The weight in fp32 with its ranges cut; 8 bits have no need of it."""
        own, wide = self.schemes[name].grid, weight.float()
        attention, _, leaf = name.rpartition(".")
        if own.bits != 4 or leaf == "q_proj":
            return wide
        start = value_rows_of(self.config, attention).start if leaf in ("qkv_proj", "kv_proj") else 0
        cut = wide[start:]
        half = self.half(name)
        limits = clip_limits(cut, x, own.bits, own.group, symmetric=own.symmetric, scale_dtype=half)
        return torch.cat([wide[:start], clipped(cut, limits, own.group)])
