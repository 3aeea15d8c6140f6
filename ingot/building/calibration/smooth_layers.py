"""Activations of 8 bits, one layer after another: smoothed, and with their static scales.

An input is smoothed where a site makes it (rescaling.py) and the layer that reads it rounds it to 8 bits. A
norm's weight is stored in the engine's dtype: the columns behind it are multiplied by what it really was
divided by, so that its rounding costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ingot.building.calibration.calibrate import CalibratedLayer, naming
from ingot.building.calibration.layer_method import LayerMethod
from ingot.building.calibration.rescaling import RescalingSite, fold, rescaling_sites
from ingot.config.quantization.quant_config import SEARCH
from ingot.engine.assembly import ChosenValues
from ingot.kernels.rows.int8_rows import MOST
from ingot.quant.methods.activation_statistics import InputStatistics
from ingot.quant.methods.smoothquant import search_smoothing, smoothing_scales
from ingot.quant.schemes.linear_scheme import LinearScheme

SAMPLE = 256  # tokens that an alpha is searched with


class SmoothLayers(LayerMethod):
    """Smoothed activations and the static scales of inputs; weights are rounded by their schemes."""

    name = "smoothquant"

    def takes(self, name: str, scheme: LinearScheme) -> bool:
        """Also layers whose inputs have static scales."""
        return scheme.static or super().takes(name, scheme)

    @property
    def sample(self) -> int:
        return SAMPLE if self.quant.alpha == SEARCH else 0

    def statistic(self, name: str, in_features: int) -> InputStatistics:
        """Ranges of every input: they are kept for other builds."""
        return InputStatistics.of(in_features, self.device, sample=self.sample)

    def choose(self, layer: CalibratedLayer[InputStatistics]) -> Iterator[tuple[str, ChosenValues]]:
        """The scales of static inputs, once the layer is smoothed."""
        peaks = {}
        for name in filter(self.schemes.__contains__, layer.inputs):
            with naming(name):
                peaks[name] = layer.inputs[name].ranges.absmax()
        for site in rescaling_sites(self.config, layer.name) if self.quant.method == self.name else ():
            if site.reader in peaks:
                self.report_layer(site.reader)
                scales = self._stored(layer, site, self._scales(layer, site, peaks[site.reader]))
                fold(site, scales, layer)
                peaks[site.reader] = peaks[site.reader] / scales
        for name, peak in peaks.items():
            if self.schemes[name].static:
                yield name, ChosenValues(input_scale=(peak.amax() / MOST).reshape(1))

    def _scales(
        self, layer: CalibratedLayer[InputStatistics], site: RescalingSite, peak: torch.Tensor
    ) -> torch.Tensor:
        weight, alpha = layer.weight(f"{site.reader}.weight"), self.quant.alpha
        if alpha != SEARCH:
            assert isinstance(alpha, float)
            return smoothing_scales(peak, [weight], alpha, classes=site.classes)
        sample, scheme = layer.inputs[site.reader].sample, self.schemes[site.reader]
        assert sample is not None
        found = search_smoothing(
            [weight],
            sample.x,
            act_max=peak,
            static=scheme.static,
            group=scheme.input_group,
            classes=site.classes,
        )
        return found.scales

    def _stored(
        self, layer: CalibratedLayer[InputStatistics], site: RescalingSite, scales: torch.Tensor
    ) -> torch.Tensor:
        """What a norm is divided by once it is in its dtype; a product's rows are not rounded."""
        if site.rows is not None:
            return scales
        weight = layer.weight(f"{site.maker}.weight").float()
        kept = (weight / scales).to(self.dtype_of(f"{site.maker}.weight")).float()
        good = (kept != 0) & torch.isfinite(kept)
        return torch.where(good, weight / torch.where(good, kept, torch.ones_like(kept)), scales)
