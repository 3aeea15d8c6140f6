"""What calibration saw of linear layers' inputs, layer by layer, in a walk over samples or in an earlier one.

Layers see what the checkpoint's own weights give, whatever values are chosen. Only ranges are cached: samples
of tokens, which the search of an alpha takes, need the walk.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ingot.building.calibration.calibrate import CalibratedLayer, Held, Load, Walk, dense_model
from ingot.building.calibration.calibration_cache import calibration_key, read_ranges, write_ranges
from ingot.building.calibration.calibration_data import LENGTH, CalibrationData
from ingot.building.calibration.layer_method import Report, silent
from ingot.building.calibration.smooth_layers import SmoothLayers
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.device import parse_dtype
from ingot.engine.assembly import Assembly
from ingot.errors import ConfigError
from ingot.quant.methods.activation_statistics import ChannelRange, InputStatistics
from ingot.quant.methods.hadamard import rotate

_log = logging.getLogger(__name__)


class SeenInputs:
    """Statistics of every linear layer's input, a layer at a time.

    ``load`` gives dense tensors by name, ``method`` says what to gather, ``path`` is the file of ranges.
    """

    def __init__(
        self,
        assembly: Assembly,
        load: Load,
        data: CalibrationData,
        source: Checkpoint,
        method: SmoothLayers,
        path: Path,
        report: Report = silent,
    ) -> None:
        self._load = load
        self._device = method.device
        self._path = path
        report("looking for cached channel ranges")
        build = assembly.build
        length = min(LENGTH, build.max_seq_len)
        layers = None if build.layers is None else (build.layers[0], build.layers[1])
        self._key = calibration_key(source, data.sha256, data.samples, length, str(build.dtypes), layers)
        self._kept = None if method.sample else read_ranges(path, self._key)
        self._found: dict[str, ChannelRange] = {}
        self._walk: Walk[InputStatistics] | None = None
        if self._kept is None:
            self._walk = Walk(
                dense_model(assembly),
                load,
                data.samples,
                self._device,
                method.statistic,
                features=data.features,
                embeddings=rows_of(data, assembly),
                progress=lambda what, done, total: report(f"{what} {100 * done // total} %"),
            )
        else:
            report(f"ranges of {path.name}")

    def observe(self, name: str) -> CalibratedLayer[InputStatistics]:
        """The next layer; BuildError where what it sees is not finite."""
        if self._walk is not None:
            layer = self._walk.observe(name)
            self._found |= {name: seen.ranges for name, seen in layer.inputs.items()}
            return layer
        inputs = {}
        for one, ranges in (self._kept or {}).items():
            if one.startswith(f"{name}."):
                placed = {leaf: tensor.to(self._device) for leaf, tensor in ranges.tensors().items()}
                inputs[one] = InputStatistics(ChannelRange.from_tensors(placed))
        return CalibratedLayer(name, inputs, Held(self._load, self._device))

    def advance(self, layer: CalibratedLayer[InputStatistics]) -> None:
        """Nothing: the walk is past the layer when it is observed."""

    def keep(self) -> None:
        """Write the ranges after the last layer; a folder that cannot be written is a warning."""
        if self._kept is not None:
            return
        try:
            write_ranges(self._path, self._key, self._found)
        except OSError as error:
            _log.warning("cannot cache the channel ranges: %s", error)


def rows_of(data: CalibrationData, assembly: Assembly) -> list[torch.Tensor]:
    """The embeddings of samples, rotated where the hidden states are, in the engine's dtype; finite."""
    dtype, rotated = parse_dtype(assembly.build.dtype), bool(assembly.quant.rotation)
    found = [(rotate(one) if rotated else one).to(dtype).float() for one in data.embeddings]
    if not all(bool(one.isfinite().all()) for one in found):
        what = f"embeddings have values that are not finite in {assembly.build.dtype}"
        raise ConfigError(what, seen=data.path, field="calib", fix="`calib` or `dtype`")
    return found
