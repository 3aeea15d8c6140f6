"""What calibration saw of a decoder's inputs, layer by layer, in a walk over samples or in an earlier one.

Owns the choice between the two, and the file of ranges beside an engine. Knows not what ranges are for.

    seen = SeenInputs(assembly, load, data, source, device, cache_path(engine))
    for layer in seen.layers():                       # {"layers.0.self_attn.qkv_proj": InputStatistics, …}
        layer[name].ranges.absmax()
    seen.keep()

Layers see what the checkpoint's own weights give, whatever becomes of them. Only ranges are kept: samples of
tokens, which the search of an alpha takes, are walked for again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch

from ingot.checkpoint.reader import Checkpoint
from ingot.engine.assemble import Assembly, stored_tensors
from ingot.engine.calibrate import CalibratedLayer, Load, calibrate, dense_model
from ingot.engine.calibration_cache import CalibrationKey, calibration_key, read_ranges, write_ranges
from ingot.engine.golden import steady_threads
from ingot.errors import OutOfMemoryError
from ingot.processors.calibration_data import CalibrationData
from ingot.quant.calibration import ChannelRange, InputStatistics

Tell = Callable[[str], None]
_log = logging.getLogger(__name__)


class SeenInputs:
    """Statistics of every linear layer's input, a decoder layer at a time.

    Args:
        load: gives dense tensors by name.
        length: most tokens of a sample.
        path: where ranges were kept and will be.
        sample: tokens to keep of each input; 0: ranges alone.
        tell: called with what is under way.
    """

    def __init__(
        self,
        assembly: Assembly,
        load: Load,
        data: CalibrationData,
        source: Checkpoint,
        device: torch.device,
        path: Path,
        *,
        length: int,
        sample: int = 0,
        tell: Tell = lambda what: None,
    ) -> None:
        self._model = dense_model(assembly)
        self._load = load
        self._samples = data.samples
        self._device = device
        self._path = path
        self._sample = sample
        self._tell = tell
        tell("looking for cached channel ranges")
        self._key = _key(assembly, data, source, length)
        self._kept = None if sample else read_ranges(path, self._key)
        self._found: dict[str, ChannelRange] = {}

    def layers(self) -> Iterator[dict[str, InputStatistics]]:
        """Those of each layer's inputs by the linear layer's name, in order.

        Raises:
            BuildError: what a layer sees is not finite.
            OutOfMemoryError: the GPU cannot hold a layer and a batch of samples.
        """
        if self._kept is None:
            yield from self._walked()
            return
        self._tell(f"ranges of {self._path.name}")
        for index in range(len(self._model.layers)):
            prefix = f"layers.{index}."
            own = {name: seen for name, seen in self._kept.items() if name.startswith(prefix)}
            yield {name: InputStatistics(_on(seen, self._device)) for name, seen in own.items()}

    def keep(self) -> None:
        """Write the ranges of a walk that is over; a folder that cannot be written is told of."""
        if self._kept is not None:
            return
        try:
            write_ranges(self._path, self._key, self._found)
        except OSError as error:
            _log.warning("cannot cache the channel ranges: %s", error)

    def _walked(self) -> Iterator[dict[str, InputStatistics]]:
        num_bytes = sum(t.numel() * t.element_size() for t in stored_tensors(self._model).values())
        walk = calibrate(
            self._model, self._load, self._samples, self._device, self._statistic, progress=self._told
        )
        with closing(walk):  # type: ignore[type-var]
            while True:
                try:
                    with steady_threads(num_bytes, self._device):
                        layer: CalibratedLayer[InputStatistics] | None = next(walk, None)
                except torch.OutOfMemoryError:
                    raise OutOfMemoryError(
                        "calibration does not fit in the device's memory",
                        seen=f"{self._device}",
                        fix="--device cpu",
                    ) from None
                if layer is None:
                    return
                self._found |= {name: seen.ranges for name, seen in layer.inputs.items()}
                yield layer.inputs

    def _statistic(self, name: str, in_features: int) -> InputStatistics:
        return InputStatistics.of(in_features, self._device, sample=self._sample)

    def _told(self, what: str, done: int, total: int) -> None:
        self._tell(f"{what} {100 * done // total} %")


def _key(assembly: Assembly, data: CalibrationData, source: Checkpoint, length: int) -> CalibrationKey:
    build = assembly.build
    layers = None if build.layers is None else (build.layers[0], build.layers[1])
    return calibration_key(source, data.sha256, data.samples, length, build.dtype, layers)


def _on(ranges: ChannelRange, device: torch.device) -> ChannelRange:
    return ChannelRange.from_tensors({name: tensor.to(device) for name, tensor in ranges.tensors().items()})
