"""A decoder whose stored values are chosen by samples, written layer by layer.

Owns the loop of calibration: observe a layer's inputs, choose what it stores (gptq_layers.py, awq_layers.py,
rptq_layers.py, smooth_layers.py), write it, go on. Holds one decoder layer at a time.

    data = read_samples(calib, text, count, build)
    method = method_of(assembly, device, tell)
    inputs = inputs_of(method, assembly, load, data, source, cache_path(engine), tell)
    write_calibrated(assembly, load, method, inputs, writer.add)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch

from ingot.checkpoint.reader import Checkpoint
from ingot.config.build import BuildConfig
from ingot.engine.assemble import ROUNDED, Assembly, Choice, StoringModule, storing_modules
from ingot.engine.awq_layers import AwqLayers
from ingot.engine.calibrate import CalibratedLayer, Load, Walk, dense_model
from ingot.engine.golden import steady_threads
from ingot.engine.gptq_layers import GptqLayers
from ingot.engine.host_room import dense_bytes
from ingot.engine.input_statistics import SeenInputs
from ingot.engine.layer_method import LayerMethod, Tell
from ingot.engine.manifest import CalibrationEntry
from ingot.engine.rptq_layers import RptqLayers
from ingot.engine.smooth_layers import SmoothLayers
from ingot.engine.text import TextParts
from ingot.errors import OutOfMemoryError
from ingot.processors.calibration_data import LENGTH, CalibrationData, read_calibration_data

Write = Callable[[str, torch.Tensor], None]


def read_samples(path: Path, text: TextParts, count: int, build: BuildConfig) -> CalibrationData:
    """At most ``count`` samples of a file, each as long as the build takes, 512 tokens at most.

    Raises:
        ConfigError: as ``read_calibration_data``.
    """
    length = min(LENGTH, build.max_seq_len)
    return read_calibration_data(path, text.tokenizer, text.chat, samples=count, length=length)


def calibration_entry(data: CalibrationData, build: BuildConfig) -> CalibrationEntry:
    """What an engine's manifest says of its samples."""
    length = min(LENGTH, build.max_seq_len)
    return CalibrationEntry(data.sha256, len(data.samples), data.num_tokens, length)


class Inputs(Protocol):
    """What decoder layers read: a walk over samples, or what an earlier one kept."""

    def observe(self, index: int) -> CalibratedLayer[Any]:
        """The next layer."""
        ...

    def advance(self, layer: CalibratedLayer[Any]) -> None:
        """Go on with what the layer has become."""
        ...


def method_of(assembly: Assembly, device: torch.device, tell: Tell) -> LayerMethod:
    """The way in which a build that calibrates chooses."""
    kinds: dict[str | None, type[LayerMethod]] = {"gptq": GptqLayers, "awq": AwqLayers}
    quant = assembly.quant
    kind = RptqLayers if quant.in_blocks else kinds.get(quant.method, SmoothLayers)
    return kind(assembly, device, tell)


def inputs_of(
    method: LayerMethod,
    assembly: Assembly,
    load: Load,
    data: CalibrationData,
    source: Checkpoint,
    cache: Path,
    tell: Tell,
) -> Walk[Any] | SeenInputs:
    """Where a method sees the inputs of a decoder; ``cache``: where ranges are kept that stay the same."""
    if isinstance(method, SmoothLayers):
        return SeenInputs(assembly, load, data, source, method, cache, tell)

    def told(what: str, done: int, total: int) -> None:
        tell(f"{what} {100 * done // total} %")

    model = dense_model(assembly)
    return Walk(model, load, data.samples, method.device, method.statistic, propagate=True, progress=told)


def write_calibrated(
    assembly: Assembly, load: Load, method: LayerMethod, inputs: Inputs, write: Write
) -> None:
    """Every stored tensor of a decoder, in order; a machine gives the same for the same samples and threads.

    Args:
        load: gives dense tensors by name.
        write: takes a stored tensor and its name.

    Raises:
        BuildError: what a layer sees is not finite, its values cannot be chosen, or a factor that was folded
            into a tensor does not leave it within the dtype.
        OutOfMemoryError: the GPU cannot hold a layer, what is gathered of it and a batch of samples.
    """
    num_bytes = dense_bytes(assembly.model_config, method.dtype)
    for index, modules in groupby(storing_modules(assembly.model), key=lambda one: one.layer):
        if index is None:  # embeddings, the last norm, the head
            for module in modules:
                for name, tensor in module.packed(load, method.device):
                    write(name, tensor)
            continue
        try:
            with steady_threads(num_bytes, method.device):
                layer = inputs.observe(index)
                chosen = dict(method.choose(layer))
                layer.inputs.clear()
                _write_layer(layer, chosen, modules, assembly, method.device, write)
                inputs.advance(layer)
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                "calibration does not fit in the device's memory",
                seen=f"layers.{index} on {method.device}",
                fix="--device cpu",
            ) from None


def _write_layer(
    layer: CalibratedLayer[Any],
    chosen: dict[str, Choice],
    modules: Iterable[StoringModule],
    assembly: Assembly,
    device: torch.device,
    write: Write,
) -> None:
    """A layer's stored tensors; what was chosen is let go of as it is packed."""

    def load(name: str) -> torch.Tensor:
        return assembly.cast(name, layer.weight(name))

    for one in modules:
        for name, tensor in one.packed(load, device, lambda name: chosen.pop(name, ROUNDED)):
            write(name, tensor)
