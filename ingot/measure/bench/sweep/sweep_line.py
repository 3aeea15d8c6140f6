"""One precision of a sweep, in a process of its own: quality, then batch sizes until one does not fit."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from ingot.building.builder import build
from ingot.config.quantization.quant_file import read_quant
from ingot.device import dtype_name, resolve_device
from ingot.errors import ConfigError, IngotError, OutOfMemoryError
from ingot.layers.linear import held_bytes
from ingot.measure.bench.ceiling import measure_ceiling
from ingot.measure.bench.doubts import doubts
from ingot.measure.bench.latency import Latency, check_fits, measure_latency
from ingot.measure.bench.sweep.request_load import RequestLoad, measure_requests
from ingot.measure.bench.transcription_speed import TranscriptionBench, measure_transcribing, speech_tokens
from ingot.measure.side.freed_memory import lacks_memory
from ingot.measure.side.machine import Memory, forget_peak, peak_bytes
from ingot.measure.side.open_side import Side, open_side
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.transcribers import (
    HuggingFaceSpeechSide,
    IngotSpeechSide,
    SpeechSide,
    open_speech_side,
)
from ingot.memory.memory_sizes import encoded_position_bytes, kv_bytes_per_token

OK, DOES_NOT_FIT, DIED = "ok", "does not fit", "died"
BEYOND_ENGINE = "is beyond the engine"
Shape = Latency | TranscriptionBench | RequestLoad
AUTO_MOST = 4096
Progress = dict[str, Any]


class Quality(Protocol):
    """Measures a side's quality, such as ``{"perplexity": 7.31}``; {} if it cannot be evaluated.

    It opens and frees the side itself, and is pickled for another process.
    """

    def __call__(self, spec: SideSpec) -> dict[str, float]: ...


@dataclass(frozen=True)
class SweepLine:
    """One precision of one side.

    Attributes:
        name: in tables and pictures.
        quant: the linear layers' scheme; with ``is_stored`` the label of the checkpoint's own.
        calib: samples for a scheme that needs them: an engine is built for the measurement.
        max_batch_size: an engine's limit; None: any batch.
    """

    name: str
    spec: SideSpec
    quant: str = "none"
    is_stored: bool = False
    calib: str | None = None
    max_batch_size: int | None = None


@dataclass(frozen=True)
class LineWanted:
    """What is measured of a line.

    Attributes:
        batches: in growing order.
        shape: the requests, or the clips of a speech model; its own batches are not read.
        with_quality: whether its quality is not known yet.
        folder: where an engine is built for a line with samples.
    """

    batches: tuple[int, ...]
    shape: Shape
    with_quality: bool = False
    threads: int | None = None
    folder: str | None = None


def doubling(most: int = AUTO_MOST) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to ``most``."""
    return tuple(1 << power for power in range(most.bit_length()))


def measure_line(
    line: SweepLine,
    wanted: LineWanted,
    quality: Quality | None,
    opener: Callable[[SideSpec], Side] = open_side,
) -> Iterator[Progress]:
    """Yields ``{"say": text}``, ``{"batch": size}`` before a size is tried, ``{"quality": figures}`` and
    ``{"point": ...}``; the first size that does not fit is the last point.

    Raises:
        IngotError: the side cannot be loaded for another reason than memory, or takes no such requests.
    """
    try:
        if line.calib is not None:
            yield {"batch": wanted.batches[0] if wanted.batches else 1}
            yield {"say": f"{line.name}: building"}
            line = _built(line, wanted)
            yield {"batch": 0}
        if quality is not None and wanted.with_quality:
            yield from _quality(line, quality)
        if wanted.batches:
            yield from _points(line, wanted, opener)
    except (OutOfMemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        yield {"point": {"status": DOES_NOT_FIT, "reason": why(error)}}


def _quality(line: SweepLine, quality: Quality) -> Iterator[Progress]:
    yield {"say": f"{line.name}: quality"}
    try:
        yield {"quality": quality(line.spec)}
    except (OutOfMemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        yield {"quality": {}, "reason": why(error)}


def why(error: BaseException) -> str:
    """An error in one line, without advice."""
    if isinstance(error, IngotError):
        return error.what if error.seen is None else f"{error.what}: {error.seen}"
    return str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__


def measure_apart(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
    """``measure_line`` in a process of its own; if it dies, the last point says so."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, line, wanted, quality), daemon=True)
    process.start()
    there.close()
    try:
        while "end" not in (update := here.recv()):
            if "error" in update:
                raise update["error"]
            yield update
    except EOFError:
        process.join()
        reason = f"the process ended with exit code {process.exitcode}"
        if process.exitcode == -signal.SIGKILL:
            reason = "the process was killed; the machine may have run out of memory"
        yield {"point": {"status": DIED, "reason": reason}}
    finally:
        process.terminate()
        process.join()


def _work(there: Connection, line: SweepLine, wanted: LineWanted, quality: Quality | None) -> None:
    """Send all that ``measure_line`` yields."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the waiting process takes it, and ends this one
    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    try:
        for update in measure_line(line, wanted, quality):
            there.send(update)
    except IngotError as error:
        there.send({"error": error})
    except RuntimeError as error:  # a CUDA context that is lost
        there.send({"point": {"status": DIED, "reason": why(error)}})
    there.send({"end": True})


def _built(line: SweepLine, wanted: LineWanted) -> SweepLine:
    """The line of an engine, built from the checkpoint and samples; tiles as of a checkpoint in memory."""
    assert wanted.folder is not None
    spec, target = line.spec, Path(wanted.folder) / "engine"
    longest = None if isinstance(wanted.shape, TranscriptionBench) else wanted.shape.longest
    build(
        spec.source,
        target,
        dtype=spec.dtype,
        device=spec.device,
        max_batch_size=max(wanted.batches, default=1),
        max_seq_len=longest,
        quant=spec.quant,
        calib=line.calib,
        tune=False,
        proof=False,
    )
    return replace(line, spec=spec.replace(path=str(target), quant="none"), calib=None)


def _points(line: SweepLine, wanted: LineWanted, opener: Callable[[SideSpec], Side]) -> Iterator[Progress]:
    shape, spec, first = wanted.shape, line.spec, wanted.batches[0]
    device = resolve_device(spec.device)
    most = line.max_batch_size
    yield {"batch": first}
    if most is not None and first > most:
        yield _beyond(most)
        return
    yield {"say": f"{line.name}: loading"}
    with ExitStack() as opened:
        side: Any
        if isinstance(shape, TranscriptionBench):
            tokens = speech_tokens(spec)
            side = opened.enter_context(open_speech_side(spec, first))
        else:
            sizes = {"max_batch_size": first, "engine_batch_size": first, "max_seq_len": shape.longest}
            side = opener(spec.replace(**sizes))
        _check_quant(line, side.facts())
        if isinstance(shape, Latency):
            check_fits(side, first, shape.longest)
        yield {"say": f"{line.name}: the machine's ceiling"}
        ceiling = measure_ceiling(device, side.dtype)
        for batch in wanted.batches:
            yield {"batch": batch}
            if most is not None and batch > most:
                yield _beyond(most)
                return
            yield {"say": f"{line.name}: batch {batch}"}
            if isinstance(shape, RequestLoad):
                side.resize_for(batch, shape.lengths)
            else:
                side.resize(batch)
            if isinstance(shape, TranscriptionBench):
                forget_peak(device)
                side.warm_up()
                (entry,) = measure_transcribing(side, shape.replace(batches=(batch,)), tokens)
                facts, memory = _speech_facts(side), _speech_memory(side, spec)
            elif isinstance(shape, RequestLoad):
                side.warm_up(batch)
                entry = measure_requests(side, shape, batch, ceiling)
                facts, memory = side.facts(), side.memory()
            else:
                side.warm_up(batch)
                (entry,) = measure_latency(side, shape.replace(batches=(batch,)), ceiling)
                del entry["raw"]
                facts, memory = side.facts(), side.memory()
            known = {"dtype": dtype_name(side.dtype), "facts": facts, "ceiling": ceiling.to_json()}
            point = {"status": OK, "figures": entry, "memory": memory.to_json()}
            yield {"point": point | known | {"doubts": doubts([entry])}}


def _beyond(most: int) -> Progress:
    return {"point": {"status": BEYOND_ENGINE, "reason": f"built with a max_batch_size of {most}"}}


def _speech_facts(side: SpeechSide) -> dict[str, Any]:
    peak = peak_bytes(side.device) if side.device.type == "cuda" else None
    return side.facts() | ({} if peak is None else {"peak_gpu_gb": round(peak / 1e9, 3)})


def _speech_memory(side: SpeechSide, spec: SideSpec) -> Memory:
    """A class's caches are computed, for a batch of whole windows and longest texts."""
    peak = peak_bytes(side.device)
    if isinstance(side, IngotSpeechSide):
        held = side.llm.executor.runner.caches
        caches = [cache for one in held for cache in (one, one.encoded) if cache is not None]
        return Memory(_weight_bytes(side.llm.engine.model), sum(cache.nbytes for cache in caches), peak)
    assert isinstance(side, HuggingFaceSpeechSide)
    config, dtype = spec.config(), side.dtype
    assert config.encoder is not None
    window = config.max_positions * kv_bytes_per_token(config, dtype)
    window += config.encoder.max_positions * encoded_position_bytes(config, dtype, dtype)
    return Memory(_weight_bytes(side.model), side.batch * window, peak)


def _weight_bytes(model: torch.nn.Module) -> int:
    return held_bytes(model)


def _check_quant(line: SweepLine, facts: dict[str, Any]) -> None:
    """Raise a ConfigError if the side was loaded in another precision than the line's."""
    found = facts.get("quantization", "none")
    wanted = line.quant if line.is_stored else read_quant(line.quant).label
    if found != wanted:
        raise ConfigError(
            "the checkpoint was not loaded in the requested precision",
            seen=found,
            allowed=wanted,
            field="quant",
        )
