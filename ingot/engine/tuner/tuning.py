"""``tune``: an engine's kernel plan, measured on this GPU.

Owns the way from an engine folder to its plan.json. Knows no op and no clock.

    tuning = tune("engine")
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ingot.config.build import BuildConfig
from ingot.config.plan import OPS, KernelPlan, Measured
from ingot.device import on_device, parse_dtype, resolve_device
from ingot.engine.assemble import empty_model
from ingot.engine.manifest import PLAN_FILE, Manifest
from ingot.engine.plan_file import machine_of, read_own_plan, usable_plan, write_plan
from ingot.engine.tuner.cases import Setting, make_case
from ingot.engine.tuner.inputs import Inputs
from ingot.engine.tuner.search import Choice, Dropped, Progress, Search
from ingot.engine.tuner.timing import GraphTimer, Timer
from ingot.engine.tuner.workload import workload
from ingot.errors import ConfigError, DeviceError, OutOfMemoryError
from ingot.layers.decoder import Decoder
from ingot.models.registry import architecture_named


@dataclass(frozen=True)
class Tuning:
    """A measured plan, each choice, the candidates that failed or were wrong, and how long it took:
    ``seconds`` in all, ``compile_seconds`` of them for Triton.
    """

    plan: KernelPlan
    choices: tuple[Choice, ...]
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
    place = gpu(device)
    folder = Path(engine)
    manifest = Manifest.read(folder)
    model = empty_model(
        architecture_named(manifest.model.architecture),
        manifest.model,
        manifest.build,
        manifest.quant,
        KernelPlan(),
    )
    tuning = tune_model(model, manifest.build, place, ops=ops, progress=progress)
    if ops is not None:
        tuning = replace(tuning, plan=_with_others(tuning.plan, read_own_plan(folder), ops, place))
    write_plan(folder / PLAN_FILE if output is None else Path(output), tuning.plan)
    return tuning


def tune_model(
    model: Decoder,
    limits: BuildConfig,
    device: torch.device,
    *,
    ops: Sequence[str] | None = None,
    timer: Timer | None = None,
    inputs: Inputs | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Measure the choices of a model whose weights need not be there.

    ``timer`` and ``inputs`` are for tests; errors are those of ``tune``.
    """
    unknown = sorted(set(ops or ()) - set(OPS))
    if unknown:
        raise ConfigError("there are no such ops to tune", seen=unknown, allowed=list(OPS), fix="--ops")
    start = time.perf_counter()
    dtype = parse_dtype(limits.dtype)
    tasks = [t for t in workload(model, dtype, limits) if ops is None or t.op in ops]
    setting = Setting(model.config, limits.max_seq_len, inputs or Inputs(device, dtype))
    make = partial(make_case, setting=setting)
    try:
        with torch.inference_mode(), on_device(device):
            outcome = Search(timer or GraphTimer(), device, progress).run(tasks, make)
    except torch.AcceleratorError as error:
        raise DeviceError("the GPU failed while tuning", seen=str(error).splitlines()[0]) from error
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            "the GPU has too little free memory to tune",
            seen=str(error).split(". ")[0],
            fix="free memory, or build with --no-tune",
        ) from None
    plan = _plan(outcome.choices, device, dtype)
    seconds = time.perf_counter() - start
    return Tuning(plan, tuple(outcome.choices), tuple(outcome.dropped), seconds, outcome.compile_seconds)


def _with_others(new: KernelPlan, old: KernelPlan, ops: Sequence[str], device: torch.device) -> KernelPlan:
    """The new plan with an old one's other ops, if the old one holds here."""
    dtype = torch.float16 if new.value_bytes == 2 else torch.float32
    old, _ = usable_plan(old, device, dtype)
    tiles = {op: choices for op, choices in old.tiles.items() if op not in ops}
    measured = {op: times for op, times in old.measured.items() if op not in ops}
    return new.replace(tiles=tiles | new.tiles, measured=measured | new.measured)


def gpu(device: str) -> torch.device:
    """The GPU behind a device's name.

    Raises:
        DeviceError: it is no GPU.
    """
    place = resolve_device(device)
    if place.type != "cuda":
        raise DeviceError(
            "tile choices are measured on a GPU", seen=place, allowed="cuda, cuda:N", fix="--device"
        )
    return place


def _plan(choices: Sequence[Choice], device: torch.device, dtype: torch.dtype) -> KernelPlan:
    tiles: dict[str, dict[str, dict[str, int]]] = {}
    measured: dict[str, dict[str, Measured]] = {}
    for choice in choices:
        op, key = choice.task.op, choice.task.key
        times = Measured(round(choice.default_us, 2), round(choice.best_us, 2))
        measured.setdefault(op, {})[key] = times
        if choice.tiles is not None:
            tiles.setdefault(op, {})[key] = dict(choice.tiles)
    here = machine_of(device, dtype)
    return KernelPlan(here.gpu, here.capability, here.value_bytes, here.torch, here.triton, tiles, measured)
