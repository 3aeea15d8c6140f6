"""A decoder's weights for activations of 8 bits: smoothed, and with the static scales that follow.

Owns the smoothing of one decoder layer after another and the scales of its inputs. Knows no file.

    chosen = SmoothedWeights(assembly, load, seen.layers(), device)
    for name, tensor in assembly.tensors(source, device, chosen): ...

An input is smoothed where a site makes it (rescaling.py) and the layer that reads it rounds it to 8 bits. A
norm's weight is stored in the engine's dtype: the columns behind it are multiplied by what it really was
divided by, so that its rounding costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from ingot.checkpoint.reader import Checkpoint
from ingot.config.quant import HEAD, SEARCH
from ingot.engine.assemble import Assembly, cast_weight
from ingot.engine.calibrate import Load, naming
from ingot.engine.input_statistics import SeenInputs
from ingot.engine.rescaling import RescalingSite, fold, rescaling_sites
from ingot.kernels.rows.int8_rows import MOST
from ingot.layers.linear import linears
from ingot.processors.calibration_data import LENGTH, CalibrationData
from ingot.quant.calibration import InputStatistics
from ingot.quant.int8_both import Int8Both
from ingot.quant.smoothquant import search_smoothing, smoothing_scales

SAMPLE = 256  # tokens that an alpha is searched with
Tell = Callable[[str], None]


class SmoothedWeights:
    """The tensors of a decoder before packing, and the static scales of its inputs.

    The layers are asked for in the model's order (packed_tensors), each once.
    """

    def __init__(
        self,
        assembly: Assembly,
        load: Load,
        layers: Iterator[Mapping[str, InputStatistics]],
        device: torch.device,
        tell: Tell = lambda what: None,
    ) -> None:
        """``load`` gives dense tensors by name, ``layers`` what each decoder layer's inputs were."""
        self._schemes = {
            name: linear.scheme
            for name, linear in linears(assembly.model).items()
            if name != HEAD and isinstance(linear.scheme, Int8Both)
        }
        self._config = assembly.model_config
        self._quant = assembly.quant
        self._dtype_of = assembly.dtype_of
        self._device = device
        self._load = load
        self._layers = layers
        self._tell = tell
        self._index = -1
        self._layer = _Layer(load, device)
        self._steps: dict[str, torch.Tensor] = {}

    def load(self, name: str) -> torch.Tensor:
        """A tensor as it is before packing, of a layer on the device: fp32 where it was folded into and is
        packed with its input in 8 bits, else in the engine's dtype.

        Raises:
            BuildError: what a layer sees is not finite, or a folded tensor does not fit the dtype.
            OutOfMemoryError: the GPU cannot hold a layer.
        """
        parts = name.split(".")
        if parts[0] != "layers":
            return self._load(name)
        self._reach(int(parts[1]))
        tensor = self._layer.weight(name)
        narrow = name.removesuffix(".weight") in self._schemes
        return tensor if narrow else cast_weight(name, tensor, self._dtype_of(name))

    def numbers(self, name: str) -> None:
        """Numbers are rounded by the scheme."""
        return

    def input_scale(self, name: str) -> torch.Tensor | None:
        """fp32 [1], one step of the input of a linear layer; None: its scales are not static."""
        scheme = self._schemes.get(name)
        if scheme is None or not scheme.static:
            return None
        self._reach(int(name.split(".")[1]))
        return self._steps[name]

    def _reach(self, index: int) -> None:
        """Smooth the layer ``index``; layers before it are gone."""
        while self._index < index:
            seen = next(self._layers)
            self._index += 1
            self._layer = _Layer(self._load, self._device)
            self._smooth(seen)
        assert self._index == index, f"layers.{index} was requested after layers.{self._index}"

    def _smooth(self, seen: Mapping[str, InputStatistics]) -> None:
        peaks = {}
        for name in self._schemes.keys() & seen.keys():
            with naming(name):
                peaks[name] = seen[name].ranges.absmax()
        if self._quant.method == "smoothquant":
            for site in rescaling_sites(self._config, self._index):
                if site.reader in peaks:
                    self._tell(f"{site.reader} by SmoothQuant")
                    scales = self._stored(site, self._scales(site, seen[site.reader], peaks[site.reader]))
                    fold(site, scales, self._layer)
                    peaks[site.reader] = peaks[site.reader] / scales
        self._steps = {name: (peak.amax() / MOST).reshape(1) for name, peak in peaks.items()}

    def _scales(self, site: RescalingSite, seen: InputStatistics, peak: torch.Tensor) -> torch.Tensor:
        weight, alpha = self._layer.weight(f"{site.reader}.weight"), self._quant.alpha
        if alpha != SEARCH:
            assert isinstance(alpha, float)
            return smoothing_scales(peak, [weight], alpha, classes=site.classes)
        assert seen.sample is not None
        scheme = self._schemes[site.reader]
        found = search_smoothing(
            [weight],
            seen.sample.x,
            act_max=peak,
            static=scheme.static,
            group=scheme.input_group,
            classes=site.classes,
        )
        return found.scales

    def _stored(self, site: RescalingSite, scales: torch.Tensor) -> torch.Tensor:
        """What a norm is divided by once it is in its dtype; a product's rows are not rounded."""
        if site.rows is not None:
            return scales
        weight = self._layer.weight(f"{site.maker}.weight").float()
        kept = (weight / scales).to(self._dtype_of(f"{site.maker}.weight")).float()
        good = (kept != 0) & torch.isfinite(kept)
        return torch.where(good, weight / torch.where(good, kept, torch.ones_like(kept)), scales)


def seen_inputs(
    assembly: Assembly,
    load: Load,
    data: CalibrationData,
    source: Checkpoint,
    device: torch.device,
    path: Path,
    tell: Tell,
) -> SeenInputs:
    """What smoothing and static scales take of the samples; arguments are as of ``SeenInputs``."""
    sample = SAMPLE if assembly.quant.alpha == SEARCH else 0
    length = min(LENGTH, assembly.build.max_seq_len)
    return SeenInputs(assembly, load, data, source, device, path, length=length, sample=sample, tell=tell)


class LayerOnce:
    """A ``Load`` that keeps the tensors of the decoder layer that it was last asked for, on a device: the
    walk asks for each, and then the folding.
    """

    def __init__(self, load: Load, device: torch.device) -> None:
        self._load = load
        self._device = device
        self._index = ""
        self._kept: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        """A tensor by the model's name for it; nobody may write to it."""
        kind, _, rest = name.partition(".")
        if kind != "layers":
            return self._load(name)
        index = rest.partition(".")[0]
        if index != self._index:
            self._kept.clear()
            self._index = index
        if name not in self._kept:
            self._kept[name] = self._load(name).to(self._device)
        return self._kept[name]


class _Layer:
    """Parameters of one layer, those that were replaced and the checkpoint's own."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self._load = load
        self._device = device
        self._own: dict[str, torch.Tensor] = {}

    def weight(self, name: str) -> torch.Tensor:
        """A parameter by its name in the model, on the device."""
        if name not in self._own:
            self._own[name] = self._load(name).to(self._device)
        return self._own[name]

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Take another value."""
        self._own[name] = tensor
