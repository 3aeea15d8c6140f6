"""``tune``: an engine's kernel plan, measured on this GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ingot.building.tuner.kernel_timing import GraphTimer
from ingot.building.tuner.tile_search import (
    Dropped,
    Progress,
    Search,
    TileChoice,
    encoder_steps,
    measured_steps,
)
from ingot.building.tuner.tuned_steps import Steps
from ingot.config.build_config import BuildConfig
from ingot.config.kernel_plan import OPS, KernelPlan, MeasuredTimes
from ingot.device import on_device, parse_dtype, resolve_device
from ingot.engine.assembly import model_of
from ingot.engine.manifest import PLAN_FILE, Manifest
from ingot.engine.plan_file import expect_writable, machine_of, read_own_plan, usable_plan, write_plan
from ingot.errors import ConfigError, DeviceError, OutOfMemoryError
from ingot.layers.decoder import Decoder

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuning:
    """A measured plan, each choice, the candidates that failed or were wrong, and how long it took:
    ``seconds`` in all, ``compile_seconds`` of them for Triton.
    """

    plan: KernelPlan
    choices: tuple[TileChoice, ...]
    dropped: tuple[Dropped, ...]
    seconds: float
    compile_seconds: float


def tune(
    engine: str | Path,
    *,
    device: str = "auto",
    output: str | Path | None = None,
    ops: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Measure the tile choices of an engine on a GPU and write its plan.json, whole or not at all.

    Weights are not read: random ones of the same shapes are timed.

    Args:
        device: ``auto`` or ``cuda`` or ``cuda:N``.
        output: where the plan goes; None: into the engine.
        ops: only these; what the engine's plan has of the others stays if it was measured on this machine.
        progress: called as (what is done, steps done, steps in all).

    Raises:
        EngineError: the folder is no engine.
        DeviceError: there is no GPU, or it fails.
        ConfigError: an op is unknown.
    """
    folder = Path(engine)
    manifest = Manifest.read(folder)
    target = folder / PLAN_FILE if output is None else Path(output)
    place = gpu(device)
    expect_writable(target)
    before = None if ops is None else read_own_plan(folder)
    if not manifest.quant.dense:
        _log.warning("quantized matmuls keep their default tiles: tuning them is not supported yet")
    tuning = tune_model(model_of(manifest), manifest.build, place, ops=ops, progress=progress)
    if ops is not None and before is not None:
        # An old plan's other ops stay, if it holds on this machine.
        new = tuning.plan
        old, _ = usable_plan(before, place, torch.float16 if new.value_bytes == 2 else torch.float32)
        tiles = {op: choices for op, choices in old.tiles.items() if op not in ops}
        measured = {op: times for op, times in old.measured.items() if op not in ops}
        plan = new.replace(tiles=tiles | new.tiles, measured=measured | new.measured)
        tuning = replace(tuning, plan=plan)
    write_plan(target, tuning.plan)
    return tuning


def tune_model(
    model: Decoder,
    limits: BuildConfig,
    device: torch.device,
    *,
    ops: Sequence[str] | None = None,
    timer: GraphTimer | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Measure the choices of a model whose weights need not be there.

    ``timer`` is for tests; errors are those of ``tune``.
    """
    unknown = sorted(set(ops or ()) - set(OPS))
    if unknown:
        raise ConfigError("no such ops to tune", seen=unknown, allowed=list(OPS), field="ops")
    start = time.perf_counter()
    try:
        with torch.inference_mode(), on_device(device):
            search = Search(Steps(model, limits, device), device, timer or GraphTimer(), progress)
            kinds = [*measured_steps(limits), *encoder_steps(model.config, limits)]
            # RPTQ's products take no tiles from a plan.
            tunable = {op for op in OPS if not (model.quant.in_blocks and op.startswith("small_"))}
            search.prepare(kinds, tunable & set(OPS if ops is None else ops))
            compiled = time.perf_counter()
            choices = search.choices()
    except torch.AcceleratorError as error:
        raise DeviceError("the GPU failed while tuning", seen=str(error).splitlines()[0]) from error
    except (torch.OutOfMemoryError, OutOfMemoryError) as error:
        seen, fix = str(error).split(". ")[0], "free memory, or build with `tune=False`"
        raise OutOfMemoryError("not enough free GPU memory to tune", seen=seen, fix=fix) from None
    plan = _plan(choices, device, parse_dtype(limits.dtype))
    seconds = time.perf_counter() - start
    return Tuning(plan, tuple(choices), tuple(search.dropped), seconds, compiled - start)


def _plan(choices: Iterable[TileChoice], device: torch.device, dtype: torch.dtype) -> KernelPlan:
    tiles: dict[str, dict[str, dict[str, int]]] = {}
    measured: dict[str, dict[str, MeasuredTimes]] = {}
    for choice in choices:
        op, key = choice.place
        times = MeasuredTimes(round(choice.default_us, 2), round(choice.best_us, 2))
        measured.setdefault(op, {})[key] = times
        if choice.tiles is not None:
            tiles.setdefault(op, {})[key] = dict(choice.tiles)
    return KernelPlan(**vars(machine_of(device, dtype)), tiles=tiles, measured=measured)


def gpu(device: str) -> torch.device:
    """The GPU behind a device's name; DeviceError where it is none."""
    place = resolve_device(device)
    if place.type != "cuda":
        raise DeviceError(
            "tuning needs the GPU that will run the engine",
            seen=f"{place}; no GPU here" if not torch.cuda.is_available() else place,
            allowed="cuda, cuda:N",
            fix="run it on the machine with the GPU; without a plan the kernels use their defaults",
        )
    return place
