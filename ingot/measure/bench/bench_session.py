"""A measurement of one or two sides; on a GPU, two run one after the other, each in its own process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar, Protocol

import torch

from ingot.config.modality import BENCH_TRANSCRIBE, expect_text
from ingot.device import dtype_name, resolve_device
from ingot.errors import DeviceError
from ingot.measure.bench.caption_speed import CaptionBench, check_pictures, measure_pictures
from ingot.measure.bench.ceiling import Ceiling, measure_ceiling
from ingot.measure.bench.doubts import doubts
from ingot.measure.bench.kernel_bench.kernel_times import Kernels, measure_kernels, read_shape
from ingot.measure.bench.latency import Latency, TextLatency, character_figures, check_fits, measure_latency
from ingot.measure.bench.throughput import Throughput, measure_throughput
from ingot.measure.bench.transcription_speed import TranscriptionBench, measure_clips
from ingot.measure.side.freed_memory import gpu_memory
from ingot.measure.side.machine import machine
from ingot.measure.side.open_side import Say, Side, check_classes, open_side, silent
from ingot.measure.side.side_spec import SideSpec, named_apart, read_tokenizer

SCHEMA = 1
Record = dict[str, Any]
Wanted = Latency | Throughput | TranscriptionBench | CaptionBench


def bench(
    spec: SideSpec,
    wanted: Wanted,
    against: SideSpec | None = None,
    *,
    command: str = "",
    say: Say | None = None,
) -> Record:
    """The record of what is ``wanted``, on two sides if ``against`` names one. After a Ctrl-C it has the
    batch sizes and sides that were finished, and ``interrupted``; without any, KeyboardInterrupt goes on.
    """
    say = say or silent
    device = resolve_device(spec.device)
    if against is not None:
        spec, against = named_apart(spec, against)
    if isinstance(wanted, CaptionBench):
        for side in (spec, against) if against is not None else (spec,):
            check_pictures(side, read_shape(side).config)
    elif not isinstance(wanted, TranscriptionBench):
        expect_text(read_shape(spec).config.modality, "this measurement", BENCH_TRANSCRIBE)
    check_classes([spec] if against is None else [spec, against])
    apart = against is not None and device.type == "cuda"
    measure = _measure_apart if apart else measure_side
    first, ceiling = measure(spec, wanted, None, say)
    sides, interrupted = [first], first.pop("interrupted", False)
    if against is not None and not interrupted:
        try:
            sides.append(measure(against, wanted, ceiling, say)[0])
            interrupted = sides[1].pop("interrupted", False)
        except KeyboardInterrupt:
            interrupted = True
    record = record_of(wanted, command, device, ceiling, sides)
    if len(sides) == 2:
        record["ratios"] = [
            {name: a[name] if name == "batch" else _speedup(name, a, b) for name in wanted.compared}
            for a, b in zip(sides[0]["results"], sides[1]["results"], strict=not interrupted)
        ]
    return record | ({"interrupted": True} if interrupted else {})


def bench_kernels(spec: SideSpec, wanted: Kernels, *, command: str = "", say: Say | None = None) -> Record:
    """The record of every kernel at a model's shapes (``measure_kernels``); its weights are not read.

    Raises:
        DeviceError: the device is not a GPU.
        IngotError: the model's shape cannot be read.
    """
    device = resolve_device(spec.device)
    if device.type != "cuda":
        raise DeviceError(
            "kernels are measured on a GPU", seen=str(device), field="device", fix="`device=cuda`"
        )
    say = say or silent
    shape = read_shape(spec)
    say("the machine's ceiling")
    ceiling = measure_ceiling(device, shape.dtype)
    results = measure_kernels(shape, wanted, device, ceiling, say)
    facts = {"model": shape.config.to_json(), "dtype": dtype_name(shape.dtype), "plan_gpu": shape.plan.gpu}
    side = {"name": "ingot", "spec": spec.to_json(), "facts": facts, "results": results}
    return record_of(wanted, command, device, ceiling, [side])


def measure_side(
    spec: SideSpec, wanted: Wanted, ceiling: Ceiling | None, say: Say = silent
) -> tuple[Record, Ceiling]:
    """Open one side, warm it up and measure it, after the machine's ceiling if none is given."""
    with gpu_memory(f"{spec.title} does not fit", "a smaller `batch` or `hf_batch`, or a larger GPU"):
        if isinstance(wanted, TranscriptionBench):
            return measure_clips(spec, wanted, ceiling, say)
        if isinstance(wanted, CaptionBench):
            return measure_pictures(spec, wanted, ceiling, say)
        return _measure_side(spec, wanted, ceiling, say)


def _measure_side(
    spec: SideSpec, wanted: Latency | Throughput, ceiling: Ceiling | None, say: Say
) -> tuple[Record, Ceiling]:
    say(f"loading {spec.title}")
    side = open_side(spec)
    if isinstance(wanted, Latency):
        most, longest = wanted.most, wanted.longest
    else:
        most, longest = min(len(wanted.load.asks), side.max_batch_size), wanted.load.longest
    check_fits(side, most, longest)
    side.make_room(most, longest)
    if ceiling is None:
        say("the machine's ceiling")
        ceiling = measure_ceiling(side.device, side.dtype)
        if side.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(side.device)
    say(f"warming up {side.name}")
    side.warm_up(most)
    results: list[Record] = []
    interrupted = False
    try:
        for entry in _entries(side, wanted, spec, ceiling, say):
            results.append(entry)
    except KeyboardInterrupt:
        if not results:
            raise
        interrupted = True
    record: Record = {"name": side.name, "spec": spec.to_json(), "facts": side.facts(), "results": results}
    if interrupted:
        record["interrupted"] = True
    return record | {"doubts": doubts(results)}, ceiling


def _entries(
    side: Side, wanted: Latency | Throughput, spec: SideSpec, ceiling: Ceiling, say: Say
) -> Iterator[Record]:
    """The results of a side, as each is measured."""
    if isinstance(wanted, TextLatency):
        decode = read_tokenizer(spec, "`prompt_tokens` instead of `text`").decode
        yield from measure_latency(side, wanted, ceiling, say, lambda runs: character_figures(runs, decode))
    elif isinstance(wanted, Latency):
        yield from measure_latency(side, wanted, ceiling, say)
    else:
        yield measure_throughput(side, wanted.load, wanted.repeats, ceiling, say)


def _measure_apart(
    spec: SideSpec, wanted: Wanted, ceiling: Ceiling | None, say: Say
) -> tuple[Record, Ceiling]:
    say(f"{spec.title} in a process of its own")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_side, spec, wanted, ceiling).result()


class Measurement(Protocol):
    """What was wanted: which verb measures it, how, and its settings."""

    verb: ClassVar[str]
    method: ClassVar[str]

    def to_json(self) -> dict[str, Any]: ...


def record_of(
    wanted: Measurement, command: str, device: torch.device, ceiling: Ceiling, sides: list[Record]
) -> Record:
    """The record of a measurement of one or two ``sides``, with the machine that it was taken on."""
    return {
        "schema": SCHEMA,
        "verb": wanted.verb,
        "command": command,
        "machine": machine(device),
        "ceiling": ceiling.to_json(),
        "method": wanted.method,
        "wanted": wanted.to_json(),
        "sides": sides,
        "ratios": [],
    }


def _speedup(name: str, ours: Record, theirs: Record) -> float | None:
    """Above 1 if our side is better; None if a side lacks the figure."""
    if name.endswith("_per_s"):
        a, b = ours[name], theirs[name]
    else:
        field = name if name in ("s_per_character", "seconds") else f"{name}_ms"
        figure = "mean" if name == "s_per_character" else "p50"
        a, b = (None if side[field] is None else side[field][figure] for side in (theirs, ours))
    return None if a is None or not b else round(a / b, 3)
