"""A model whose stored values are chosen by samples, written layer by layer: observe a layer's inputs, choose
what it stores (``…_layers.py``), write it, go on. One layer is in memory at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ingot.building.calibration.awq_layers import AwqLayers
from ingot.building.calibration.calibrate import CalibratedLayer, Load, Walk, dense_model
from ingot.building.calibration.calibration_data import LENGTH, SAMPLES, CalibrationData
from ingot.building.calibration.gptq_layers import GptqLayers
from ingot.building.calibration.input_statistics import SeenInputs, rows_of
from ingot.building.calibration.layer_method import LayerMethod, Report, silent
from ingot.building.calibration.rptq_layers import RptqLayers
from ingot.building.calibration.smooth_layers import SmoothLayers
from ingot.building.golden.golden_cases import steady_threads
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.config.build_config import BuildConfig
from ingot.config.quantization.rptq_options import RANGES
from ingot.device import parse_dtype
from ingot.engine.assembly import ROUNDED, Assembly, ChosenValues, StoringModule, storing_modules
from ingot.engine.manifest import CalibrationEntry, KindRanges
from ingot.errors import OutOfMemoryError
from ingot.memory.host_memory import dense_bytes
from ingot.quant.methods.rptq import KEPT

_log = logging.getLogger(__name__)

Write = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class Outcome:
    """What calibration saw of activations.

    Attributes:
        kept: ranges of channels, which another build may read; None where none can.
        ranges: of RPTQ by site those of tokens and of spliced positions, where samples have both.
    """

    kept: SeenInputs | None = None
    ranges: dict[str, KindRanges] = field(default_factory=dict)


def calibration_entry(
    data: CalibrationData, build: BuildConfig, ranges: dict[str, KindRanges]
) -> CalibrationEntry:
    """What an engine's manifest says of its samples, and of their ranges."""
    length = min(LENGTH, build.max_seq_len)
    return CalibrationEntry(data.sha256, len(data.samples), data.num_tokens, length, ranges)


def warn_of_few(data: CalibrationData, assembly: Assembly) -> None:
    """Warn of fewer tokens than a model is wide, and of few records in a moving average."""
    width, rptq, records = assembly.model_config.hidden_size, assembly.quant.rptq, len(data.samples)
    if data.num_tokens < width:
        _log.warning(
            "%s has only %s tokens, fewer than a layer's %s inputs, so the quantization may overfit them; "
            "give more or longer samples (`calib`, `calib_samples`)",
            data.path,
            data.num_tokens,
            width,
        )
    if rptq is not None and rptq.ranges == RANGES[0] and records < SAMPLES:
        _log.warning(
            "with %s records the moving average of RPTQ's ranges gives the first one %d %% of the weight; "
            "give %s records (`calib`, `calib_samples`), or take the extremes of all (`ranges=minmax`)",
            records,
            round(100 * KEPT ** (records - 1)),
            SAMPLES,
        )


def write_calibrated(
    assembly: Assembly,
    source: Checkpoint,
    data: CalibrationData,
    device: torch.device,
    write: Write,
    cache: Path,
    report: Report = silent,
) -> Outcome:
    """Write every stored tensor of a model, in order; the same for the same machine, samples and threads.

    Args:
        write: takes a stored tensor and its name.
        cache: where ranges of inputs were kept, and may be once the engine is whole.
        report: called with what is in progress.

    Raises:
        BuildError: what a layer sees is not finite, its values cannot be chosen, or a factor that was folded
            into a tensor does not leave it within the dtype.
        OutOfMemoryError: the GPU cannot hold a layer, what is gathered of it and a batch of samples.
    """
    load = partial(assembly.load, checkpoint=source, device=device)
    quant, kinds = assembly.quant, {"gptq": GptqLayers, "awq": AwqLayers}
    kind = RptqLayers if quant.in_blocks else kinds.get(quant.method or "", SmoothLayers)
    method: LayerMethod = kind(assembly, device, report)
    inputs: Walk[Any] | SeenInputs
    if isinstance(method, SmoothLayers):
        inputs = SeenInputs(assembly, load, data, source, method, cache, report)
    else:
        inputs = Walk(
            dense_model(assembly),
            load,
            data.samples,
            device,
            method.statistic,
            features=data.features,
            embeddings=rows_of(data, assembly),
            propagate=True,
            progress=lambda what, done, total: report(f"{what} {100 * done // total} %"),
        )
    num_bytes = dense_bytes(assembly.model_config, parse_dtype(method.dtypes.wider))
    for name, modules in groupby(storing_modules(assembly.model), key=lambda one: one.layer):
        if name is None:  # convolutions, embeddings, last norms, the head
            _write(modules, load, device, write)
            continue
        try:
            with steady_threads(num_bytes, device):
                layer = inputs.observe(name)
                chosen = dict(method.choose(layer))
                layer.inputs.clear()
                _write(modules, partial(_changed, assembly, layer), device, write, chosen)
                inputs.advance(layer)
        except torch.OutOfMemoryError:
            what, seen = "calibration does not fit in the device's memory", f"{name} on {device}"
            raise OutOfMemoryError(what, seen=seen, fix="`device=cpu`") from None
    ranges = method.kinds if isinstance(method, RptqLayers) else {}
    return Outcome(inputs if isinstance(inputs, SeenInputs) else None, ranges)


def _changed(assembly: Assembly, layer: CalibratedLayer[Any], name: str) -> torch.Tensor:
    """A tensor of a layer as calibration left it, before packing."""
    return assembly.cast(name, layer.weight(name))


def _write(
    modules: Iterable[StoringModule],
    load: Load,
    device: torch.device,
    write: Write,
    chosen: dict[str, ChosenValues] | None = None,
) -> None:
    """The stored tensors of modules; what was chosen is let go of as it is packed."""
    own = {} if chosen is None else chosen
    for module in modules:
        for name, tensor in module.packed(load, device, lambda path: own.pop(path, ROUNDED)):
            write(name, tensor)
