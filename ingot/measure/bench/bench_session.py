"""A whole measurement: the machine, its ceiling, one or two sides, and what sets them apart.

Owns the order of a measurement and the record that comes of it. On a GPU two sides run in processes of their
own, one after the other, so that each has the whole memory. Knows no output format.

    record = bench(SideSpec(path="engines/pocket-chat", max_batch_size=8), Latency(batches=(1, 8)))
    record["sides"][0]["results"][0]["decode_ms"]["p50"]
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from ingot.config.modality import BENCH_TRANSCRIBE, expect_text
from ingot.device import dtype_name, resolve_device
from ingot.errors import DeviceError
from ingot.measure.bench.caption_speed import METHOD as PICTURES_METHOD
from ingot.measure.bench.caption_speed import CaptionBench, check_pictures, measure_pictures
from ingot.measure.bench.ceiling import Ceiling, measure_ceiling
from ingot.measure.bench.doubts import doubts
from ingot.measure.bench.kernel_bench.kernel_times import Kernels, measure_kernels, read_shape
from ingot.measure.bench.latency import Latency, check_fits, measure_latency
from ingot.measure.bench.text_latency import TextLatency, character_figures
from ingot.measure.bench.throughput import Throughput, measure_throughput
from ingot.measure.bench.transcription_speed import METHOD as CLIPS_METHOD
from ingot.measure.bench.transcription_speed import TranscriptionBench, measure_clips
from ingot.measure.side.freed_memory import gpu_memory
from ingot.measure.side.machine import machine
from ingot.measure.side.open_side import Say, Side, check_classes, open_side, silent
from ingot.measure.side.side_spec import SideSpec, named_apart, read_tokenizer

SCHEMA = 1
METHOD = "greedy, end tokens ignored, new random prompts at every call so that no prefix is reused"
TEXT_METHOD = "greedy, end tokens ignored, the text as the prompt of every request, no prefix reuse"
_TEXT = "`prompt_tokens` instead of `text`"
Record = dict[str, Any]
_COMPARED = {
    "latency": ("batch", "ttft", "decode", "output_tokens_per_s"),
    "text": ("batch", "ttft", "decode", "s_per_character"),
    "throughput": ("output_tokens_per_s", "ttft", "tpot"),
    "transcribe": ("batch", "seconds", "clip"),
    "caption": ("batch", "seconds", "ttft", "encoder"),
}
Wanted = Latency | Throughput | TranscriptionBench | CaptionBench
_METHODS: dict[type[Wanted], str] = {
    TextLatency: TEXT_METHOD,
    TranscriptionBench: CLIPS_METHOD,
    CaptionBench: PICTURES_METHOD,
}


def bench(
    spec: SideSpec,
    wanted: Wanted,
    against: SideSpec | None = None,
    *,
    command: str = "",
    say: Say | None = None,
) -> Record:
    """Measure batches of equal requests (``measure_latency``), a load (``measure_throughput``), clips of
    speech (``measure_clips``) or pictures (``measure_pictures``), on two sides if ``against`` names one.

    Raises:
        IngotError: a side cannot be loaded, or cannot take what is wanted.
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
    sides = [first]
    if against is not None:
        sides.append(measure(against, wanted, ceiling, say)[0])
    verb = _verb(wanted)
    record = _record(verb, command, device, ceiling, wanted.to_json(), sides)
    record["method"] = _METHODS.get(type(wanted), METHOD)
    if against is not None:
        record["ratios"] = compare("text" if isinstance(wanted, TextLatency) else verb, *sides)
    return record


def bench_kernels(spec: SideSpec, wanted: Kernels, *, command: str = "", say: Say | None = None) -> Record:
    """Measure every kernel at a model's shapes (see ``measure_kernels``); its weights are not read.

    Raises:
        DeviceError: the device is no GPU.
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
    return _record("kernels", command, device, ceiling, wanted.to_json(), [side])


def compare(verb: str, ours: Record, theirs: Record) -> list[dict[str, Any]]:
    """How many times better our side is in each result, above 1 where it is better; None where a side has no
    such figure.
    """
    return [
        {name: a[name] if name == "batch" else _times_better(name, a, b) for name in _COMPARED[verb]}
        for a, b in zip(ours["results"], theirs["results"], strict=True)
    ]


def measure_side(
    spec: SideSpec, wanted: Wanted, ceiling: Ceiling | None, say: Say = silent
) -> tuple[Record, Ceiling]:
    """Open one side, warm it up and measure it; the ceiling is measured first where none is given.

    Raises:
        IngotError: it cannot be loaded, or cannot take what is wanted.
    """
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
    most, longest = _most(side, wanted)
    check_fits(side, most, longest)
    side.make_room(most, longest)
    if ceiling is None:
        say("the machine's ceiling")
        ceiling = measure_ceiling(side.device, side.dtype)
        if side.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(side.device)
    say(f"warming up {side.name}")
    side.warm_up(most)
    if isinstance(wanted, TextLatency):
        decode = read_tokenizer(spec, _TEXT).decode
        results = measure_latency(side, wanted, ceiling, say, lambda runs: character_figures(runs, decode))
    elif isinstance(wanted, Latency):
        results = measure_latency(side, wanted, ceiling, say)
    else:
        results = [measure_throughput(side, wanted.load, wanted.repeats, ceiling, say)]
    record = {"name": side.name, "spec": spec.to_json(), "facts": side.facts(), "results": results}
    return record | {"doubts": doubts(results)}, ceiling


def _most(side: Side, wanted: Latency | Throughput) -> tuple[int, int]:
    """Requests in flight at once, and tokens of the longest."""
    if isinstance(wanted, Latency):
        return wanted.most, wanted.longest
    return min(len(wanted.load.asks), side.max_batch_size), wanted.load.longest


def _measure_apart(
    spec: SideSpec, wanted: Wanted, ceiling: Ceiling | None, say: Say
) -> tuple[Record, Ceiling]:
    say(f"{spec.title} in a process of its own")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_side, spec, wanted, ceiling).result()


def _verb(wanted: Wanted) -> str:
    if isinstance(wanted, TranscriptionBench):
        return "transcribe"
    if isinstance(wanted, CaptionBench):
        return "caption"
    return "latency" if isinstance(wanted, Latency) else "throughput"


def _record(
    verb: str,
    command: str,
    device: torch.device,
    ceiling: Ceiling,
    wanted: dict[str, Any],
    sides: Sequence[Record],
) -> Record:
    return {
        "schema": SCHEMA,
        "verb": verb,
        "command": command,
        "machine": machine(device),
        "ceiling": ceiling.to_json(),
        "method": METHOD,
        "wanted": wanted,
        "sides": list(sides),
        "ratios": [],
    }


def _times_better(name: str, ours: Record, theirs: Record) -> float | None:
    if name.endswith("_per_s"):
        return _ratio(ours[name], theirs[name])
    field = name if name in ("s_per_character", "seconds") else f"{name}_ms"
    figure = "mean" if name == "s_per_character" else "p50"
    times = (side[field] for side in (theirs, ours))
    return _ratio(*(None if time is None else time[figure] for time in times))


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else round(a / b, 3)
