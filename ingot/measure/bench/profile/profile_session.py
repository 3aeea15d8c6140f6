"""Profiles one step of an engine: its kernels by module, its gaps, and what single kernels are worth.

record = profile(SideSpec("engines/pocket-chat"), Profile("decode", batch=8))
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from ingot.config.json_config import JsonConfig
from ingot.device import on_device, resolve_device
from ingot.errors import ConfigError, DeviceError
from ingot.measure.bench.bench_session import Record, record_of
from ingot.measure.bench.ceiling import Ceiling, measure_ceiling
from ingot.measure.bench.profile.answers_without import Answers, scored_without
from ingot.measure.bench.profile.module_ranges import ProfilerRanges, WorkCount, named_modules
from ingot.measure.bench.profile.profiled_step import STEPS, ReadyStep, ready_step
from ingot.measure.bench.profile.pytorch_operators import (
    FUSED,
    check_called,
    check_names,
    counted_operations,
    without_kernels,
)
from ingot.measure.bench.profile.replaced import replaced
from ingot.measure.bench.profile.step_figures import busy_figures, step_figures
from ingot.measure.bench.profile.trace_events import STEP, StepTrace, read_trace
from ingot.measure.side.freed_memory import gpu_memory
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.open_side import Say, silent
from ingot.measure.side.side_spec import SideSpec, longest
from ingot.measure.side.timed_run import spread

_PROMPT_TOKENS = 512
_WARM_UP = 3
_QUIET = ("KINETO_LOG_LEVEL", "7")  # the profiler's library would write its own progress to stderr
_LEAST_ROOM = 2  # tokens behind a prompt: the one that a step reads and the one that it chooses
_START = ("load_s", "warm_up_s")  # facts of a side that say nothing about a step


@dataclass(frozen=True)
class Profile(JsonConfig):
    """Which step, and how often it runs.

    Attributes:
        step: prompt, decode, mixed or encode.
        batch: requests; of ``mixed`` the last has a prompt and the others decode.
        prompt_tokens: of each request; None: 512, or half of what the engine takes.
        without: operations that PyTorch's operators compute instead, one after another.
        repeats: timed and profiled runs.
    """

    verb: ClassVar[str] = "profile"
    method: ClassVar[str] = (
        "one step, run again and again with the same inputs: random tokens, greedy. Tables are of steps "
        "launched kernel by kernel under torch.profiler, the mean of all; step times are medians without it"
    )
    step: str = "decode"
    batch: int = 1
    prompt_tokens: int | None = None
    without: tuple[str, ...] = ()
    repeats: int = 5

    def __post_init__(self) -> None:
        if self.step not in STEPS:
            raise ConfigError("unknown kind of step", seen=self.step, allowed=STEPS, field="step")
        for name, value in (("batch", self.batch), ("repeats", self.repeats)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1", seen=value, field=name)
        if self.step == "mixed" and self.batch < 2:
            raise ConfigError(
                "a mixed step has a prompt beside at least one decode",
                seen=f"a batch of {self.batch}",
                allowed="2 or more",
                field="batch",
            )
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise ConfigError(
                "prompt_tokens must be at least 1", seen=self.prompt_tokens, field="prompt_tokens"
            )
        check_names(self.without)


def profile(
    spec: SideSpec,
    wanted: Profile,
    *,
    trace: str | Path | None = None,
    answers: Callable[[SideSpec], Answers] | None = None,
    command: str = "",
    say: Say | None = None,
) -> Record:
    """The record of a profiled step.

    Args:
        trace: a file for the profiler's events, as Perfetto opens them.
        answers: reads what is asked with and without each kernel, before weights are read.

    Raises:
        ConfigError: the step, batch or lengths do not fit the engine, or an operation is not called.
        DeviceError: operations are left out on a CPU, or the profiler recorded nothing.
    """
    say = say or silent
    device = resolve_device(spec.device)
    if wanted.without and device.type != "cuda":
        raise DeviceError(
            "a CPU runs PyTorch's operators already: there is no kernel to leave out",
            seen=str(device),
            field="without",
            fix="`device=cuda`, or leave `without` out",
        )
    _check_step(spec, wanted)
    asked = None if answers is None else answers(spec)
    with gpu_memory("the engine does not fit", "a smaller `batch`, or a larger GPU"):
        say(f"loading {spec.title}")
        side = IngotSide(spec)
        with on_device(device):
            result, ceiling = profile_side(side, wanted, trace, say, asked)
    facts = {name: value for name, value in side.facts().items() if name not in _START}
    profiled = {"name": side.name, "spec": spec.to_json(), "facts": facts, "results": [result]}
    return record_of(wanted, command, device, ceiling, [profiled])


def profile_side(
    side: IngotSide,
    wanted: Profile,
    trace: str | Path | None = None,
    say: Say = silent,
    answers: Answers | None = None,
) -> tuple[Record, Ceiling]:
    """The figures of an opened side's step, on its device, and the ceiling beside which they are."""
    tokens = wanted.prompt_tokens or _default_tokens(side)
    room = _check_fits(side, wanted, tokens)
    side.make_room(wanted.batch, tokens + room)
    say("the machine's ceiling")
    ceiling = measure_ceiling(side.device, side.dtype)
    say(f"preparing the {wanted.step} step")
    step = ready_step(side, wanted.step, wanted.batch, tokens)
    with step.launched():
        _repeat(step, _WARM_UP)
        say("timing")
        launched = _times(step, wanted.repeats)
        work = _work_of(step)
        say("profiling")
        found = _profiled(step, wanted.repeats, side.device, Path(trace) if trace else None, named=True)
        result: Record = {
            "step": wanted.step,
            **step.facts,
            "prompt_tokens": tokens,
            "fused": step.runner.forward.fused,
            "step_ms": spread(launched, 1e3),
            "kernels": step_figures(found, work, ceiling),
            "graph": None,
            "without": _without(step, wanted, side.device, found, say),
        }
    if side.device.type == "cuda" and side.llm.runtime.cuda_graphs:
        say("the same in a CUDA graph")
        result["graph"] = _in_graph(step, wanted.repeats, side.device)
    step.end()
    if answers is not None:
        result["data"] = answers.facts()
        with step.launched():
            scores = scored_without(side, wanted.without, answers, say)
        for entry, scored in zip(result["without"], scores, strict=True):
            entry["answers"] = scored
    return result, ceiling


def _check_step(spec: SideSpec, wanted: Profile) -> None:
    """Refuse a step that the model does not have before its weights are read."""
    config = spec.config()
    if wanted.step == "encode" and config.encoder is None:
        text = [name for name in STEPS if name != "encode"]
        raise ConfigError(
            "this model encodes nothing: it takes text alone",
            seen="encode",
            allowed=", ".join(text),
            field="step",
        )
    if spec.path is not None and wanted.prompt_tokens is not None:
        _check_length(wanted.prompt_tokens, longest(spec))


def _check_fits(side: IngotSide, wanted: Profile, tokens: int) -> int:
    """Tokens that the first requests generate while the prompts of the last are computed."""
    if wanted.batch > side.max_batch_size:
        raise ConfigError(
            "the batch is larger than the engine's max_batch_size",
            seen=wanted.batch,
            allowed=f"<= {side.max_batch_size}",
            field="batch",
            fix="`batch`, or build with a larger `max_batch_size`",
        )
    decodes = wanted.step in ("decode", "mixed")
    each = max(side.llm.executor.scheduler.token_budget - wanted.batch, 1)
    room = _LEAST_ROOM + (wanted.batch * tokens // each if decodes else 0)
    _check_length(tokens, side.max_seq_len, room)
    return room


def _check_length(tokens: int, most: int, room: int = _LEAST_ROOM) -> None:
    if tokens + room > most:
        raise ConfigError(
            "the prompts are longer than the engine's limit",
            seen=f"{tokens} tokens",
            allowed=f"<= {most - room}",
            field="prompt_tokens",
        )


def _default_tokens(side: IngotSide) -> int:
    """512, or half of the longest request; with room for a picture."""
    rules = side.llm.executor.admission.inputs
    least = 1
    if rules is not None and rules.model.splices:
        least += rules.config.max_positions
    return max(min(_PROMPT_TOKENS, side.max_seq_len // 2), least)


def _repeat(step: ReadyStep, count: int) -> None:
    for _ in range(count):
        step.run()


def _times(step: ReadyStep, count: int) -> list[float]:
    """Seconds of each run, to its tokens on the host."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        step.run()
        found.append(time.perf_counter() - start)
    return found


def _work_of(step: ReadyStep) -> dict[str, Any]:
    counted = WorkCount()
    with named_modules(step.runner.model, counted):
        step.run()
    return dict(counted.work)


def _profiled(
    step: ReadyStep, repeats: int, device: torch.device, trace: Path | None = None, *, named: bool
) -> StepTrace:
    """The operations of ``repeats`` steps, after one that starts the profiler; ``named``: by module."""
    os.environ.setdefault(*_QUIET)
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as torch_profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    modules = named_modules(step.runner.model, ProfilerRanges()) if named else nullcontext()
    with modules, torch_profile(activities=activities) as profiler:
        step.run()
        for _ in range(repeats):
            with record_function(STEP):
                step.run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        text = file.read_text(encoding="utf-8")
    found = read_trace(json.loads(text)["traceEvents"], on_gpu=on_gpu)
    if trace is not None:
        trace.write_text(text, encoding="utf-8")
    return found


def _in_graph(step: ReadyStep, repeats: int, device: torch.device) -> Record | None:
    """The step as it is served: times, and how long the kernels of its graph keep the device busy. None for a
    step that is larger than any graph: it is served as it was launched before.
    """
    _repeat(step, _WARM_UP)
    times = _times(step, repeats)
    found = _profiled(step, repeats, device, named=False)
    if not found.graphs:
        return None
    launches = round(len(found.ops) / found.steps, 2)
    return {"step_ms": spread(times, 1e3), "launches": launches, **busy_figures(found)}


def _without(
    step: ReadyStep, wanted: Profile, device: torch.device, found: StepTrace, say: Say
) -> list[Record]:
    """For each operation the step's times with its kernels and with PyTorch's operators, and how far outputs
    are apart. One whose work fused kernels do is compared in the step without them.
    """
    if not wanted.without:
        return []
    forward = step.runner.forward
    called = _called(step)
    with replaced(forward, "fused", False):
        unfused = _called(step)
    check_called(wanted.without, called + unfused, fuses=forward.fused)
    entries = []
    for name in wanted.without:
        say(f"without {name}")
        fused = forward.fused and (name == FUSED or called[name] > 0)
        with replaced(forward, "fused", fused):
            entries.append({"fused": fused, **_compared(step, name, wanted.repeats, device)})
    return entries


def _called(step: ReadyStep) -> Counter[str]:
    """Calls of each operation in the step."""
    with counted_operations() as called:
        step.run()
    return called


def _compared(step: ReadyStep, name: str, repeats: int, device: torch.device) -> Record:
    """Both sides are timed here, one right after the other: a GPU's clocks change. Calls are counted of a
    step with its draws, which ``outputs`` lacks.
    """
    before, tokens = step.outputs(), step.run()
    own = _side(step, repeats, device)
    with without_kernels(name, step.runner) as calls:
        other_tokens = step.run()
        per_step = calls[name]
        after = step.outputs()
        other = _side(step, repeats, device)
    return {
        "operation": name,
        "replaced_calls": None if name == FUSED else per_step,
        "with": own,
        "without": other,
        "step_ratio": _ratio(other["step_ms"]["p50"], own["step_ms"]["p50"]),
        "kernels_ratio": _ratio(other["kernels_us"], own["kernels_us"]),
        "largest_difference": float((after - before).abs().max()) if before.numel() else None,
        "largest_output": float(before.abs().max()) if before.numel() else None,
        "same_choices": sum(a == b for a, b in zip(tokens, other_tokens, strict=True)),
        "choices": len(tokens),
    }


def _side(step: ReadyStep, repeats: int, device: torch.device) -> Record:
    times = _times(step, repeats)
    found = _profiled(step, repeats, device, named=False)
    return {
        "step_ms": spread(times, 1e3),
        "kernels_us": round(sum(op.us for op in found.ops) / found.steps, 3),
        "launches": round(len(found.ops) / found.steps, 2),
    }


def _ratio(without: float, with_: float) -> float | None:
    return round(without / with_, 3) if with_ else None
