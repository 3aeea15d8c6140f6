"""AWQ of one decoder layer after another.

Owns what AWQ gathers of a layer, which inputs it rescales and which rows it clips. Knows no walk and no file.

    method = AwqLayers(config, schemes, dtype, device)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ingot.config.model import DecoderConfig
from ingot.engine.calibrate import CalibratedLayer, naming
from ingot.engine.gptq_layers import Unseen
from ingot.engine.rescaling import fold, rescaling_sites
from ingot.quant.awq import clip_limits, clipped, search_scales
from ingot.quant.calibration import SAMPLE_ROWS, InputStatistics
from ingot.quant.rounding import Quantized, dequantize, quantize
from ingot.quant.weight_only import WeightOnly

Seen = InputStatistics | Unseen


class AwqLayers:
    """Numbers by rounding, of weights whose loud inputs were scaled up and whose ranges were cut.

    The scales of an input are folded into what makes it (rescaling.py); one without a site keeps its own.
    4-bit ranges are cut where a sample of the inputs says so, but for queries and keys.
    """

    def __init__(
        self,
        config: DecoderConfig,
        schemes: Mapping[str, WeightOnly],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``dtype`` is that in which scales are stored."""
        self._config = config
        self._schemes = schemes
        self._dtype = dtype
        self._device = device

    def statistic(self, name: str, in_features: int) -> Seen:
        """Magnitudes of channels and a sample of tokens of what narrow layers read."""
        if name not in self._schemes:
            return Unseen()
        return InputStatistics.of(in_features, self._device, sample=SAMPLE_ROWS)

    def choose(self, layer: CalibratedLayer[Seen]) -> Iterator[tuple[str, Quantized]]:
        """The numbers of each narrow linear layer, once all scales of the layer are folded."""
        sampled = {name: _sample(seen) for name, seen in layer.inputs.items() if not isinstance(seen, Unseen)}
        for site in rescaling_sites(self._config, layer.index):
            seen = layer.inputs[site.reader]
            if isinstance(seen, Unseen):
                continue
            with naming(site.reader):
                found = search_scales(
                    [layer.weight(f"{site.reader}.weight")],
                    sampled[site.reader],
                    lambda w, name=site.reader: dequantize(self._rounded(name, w)),  # type: ignore[misc]
                    group=self._schemes[site.reader].group,
                    magnitude=seen.ranges.mean_abs(),
                    classes=site.classes,
                )
                if found.ratio:
                    fold(site, found.scales, layer)
                    sampled[site.reader] = sampled[site.reader] / found.scales
        for name, x in sampled.items():
            with naming(name):
                numbers = self._rounded(name, self._narrowed(name, layer.weight(f"{name}.weight"), x))
                layer.replace(f"{name}.weight", dequantize(numbers))
            yield name, numbers

    def _rounded(self, name: str, weight: torch.Tensor) -> Quantized:
        own = self._schemes[name]
        return quantize(weight, own.bits, own.group, symmetric=own.symmetric, scale_dtype=self._dtype)

    def _narrowed(self, name: str, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The weight in fp32 with its ranges cut; 8 bits have no need of it."""
        own, wide = self._schemes[name], weight.float()
        if own.bits != 4:
            return wide
        whole = self._config.q_size + self._config.kv_size if name.endswith(".qkv_proj") else 0
        cut = wide[whole:]
        limits = clip_limits(cut, x, own.bits, own.group, symmetric=own.symmetric, scale_dtype=self._dtype)
        return torch.cat([wide[:whole], clipped(cut, limits, own.group)])


def _sample(seen: InputStatistics) -> torch.Tensor:
    assert seen.sample is not None
    return seen.sample.x
