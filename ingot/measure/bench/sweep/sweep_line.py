"""One precision of a sweep: its quality, and batch after batch until one no longer fits.

Owns the order of measuring within one side, how "does not fit" differs from other ends, and the process that
a precision has for itself, so that its death spoils nothing else. Knows no files and no other precision.

    for update in measure_apart(SweepLine("fp16", spec), wanted, None): ...
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from ingot.config.quantization.quant_file import read_quant
from ingot.device import dtype_name, resolve_device
from ingot.errors import ConfigError, IngotError, OutOfMemoryError
from ingot.measure.bench.ceiling import measure_ceiling
from ingot.measure.bench.doubts import doubts
from ingot.measure.bench.latency import Latency, check_fits, measure_latency
from ingot.measure.bench.sweep.sweep_clips import clip_points
from ingot.measure.bench.transcription_speed import TranscriptionBench
from ingot.measure.side.freed_memory import lacks_memory
from ingot.measure.side.open_side import Side, open_side
from ingot.measure.side.side_spec import SideSpec

OK, DOES_NOT_FIT, DIED = "ok", "does not fit", "died"
AUTO_MOST = 4096
Progress = dict[str, Any]


class Quality(Protocol):
    """Measures what a side's answers are worth, for example ``{"perplexity": 7.31}``.

    It opens the side itself and frees it, and is sent to another process: a function of a module, or an
    instance of a class of one.
    """

    def __call__(self, spec: SideSpec) -> dict[str, float]:
        """Figures by name; none for a side that cannot be evaluated."""
        ...


@dataclass(frozen=True)
class SweepLine:
    """One precision of one side: what tables and pictures call it, and how it is opened.

    Attributes:
        quant: the linear layers' scheme; with ``is_stored`` the label of what the checkpoint holds.
    """

    name: str
    spec: SideSpec
    quant: str = "none"
    is_stored: bool = False


@dataclass(frozen=True)
class LineWanted:
    """What is measured of a line.

    Attributes:
        batches: in growing order.
        shape: prompt tokens, new tokens and repeats, or the clips of a speech model; its own batches are not
            read.
        with_quality: whether its quality is not known yet.
    """

    batches: tuple[int, ...]
    shape: Latency | TranscriptionBench
    with_quality: bool = False
    threads: int | None = None


def doubling(most: int = AUTO_MOST) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to ``most``."""
    return tuple(1 << power for power in range(most.bit_length()))


def measure_line(
    line: SweepLine,
    wanted: LineWanted,
    quality: Quality | None,
    opener: Callable[[SideSpec], Side] = open_side,
) -> Iterator[Progress]:
    """What becomes known, as it does: ``{"say": text}``, ``{"batch": size}`` before a size is tried,
    ``{"quality": figures}``, and ``{"point": ...}``; the first size that does not fit is the last point.

    Raises:
        IngotError: the side cannot be loaded for another reason than memory, or takes no such requests.
    """
    if quality is not None and wanted.with_quality:
        yield {"say": f"{line.name}: quality"}
        yield _quality(line, quality)
    if not wanted.batches:
        return
    try:
        yield from _points(line, wanted, opener)
    except (OutOfMemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        yield {"point": {"status": DOES_NOT_FIT, "reason": why(error)}}


def _quality(line: SweepLine, quality: Quality) -> Progress:
    try:
        return {"quality": quality(line.spec)}
    except (OutOfMemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        return {"quality": {}, "reason": why(error)}


def why(error: BaseException) -> str:
    """What an error says, on one line without advice."""
    if isinstance(error, IngotError):
        return error.what if error.seen is None else f"{error.what}: {error.seen}"
    return str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__


def measure_apart(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
    """``measure_line`` in a process of its own; where that dies, the last point says so.

    Raises:
        IngotError: as ``measure_line``.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, line, wanted, quality), daemon=True)
    process.start()
    there.close()
    try:
        yield from _received(here, process)
    finally:
        process.terminate()
        process.join()


def _received(here: Connection, process: Any) -> Iterator[Progress]:
    while True:
        try:
            update = here.recv()
        except EOFError:
            process.join()
            yield {"point": {"status": DIED, "reason": _death(process.exitcode)}}
            return
        if "error" in update:
            raise update["error"]
        if "end" in update:
            return
        yield update


def _death(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the process was killed; the machine may have run out of memory"
    return f"the process ended with exit code {code}"


def _work(there: Connection, line: SweepLine, wanted: LineWanted, quality: Quality | None) -> None:
    """Send all that ``measure_line`` yields. Ctrl-C is for the process that waits; it ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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


def _points(line: SweepLine, wanted: LineWanted, opener: Callable[[SideSpec], Side]) -> Iterator[Progress]:
    shape, first = wanted.shape, wanted.batches[0]
    if isinstance(shape, TranscriptionBench):
        check = partial(_check_quant, line)
        for update in clip_points(line.name, line.spec, wanted.batches, shape, check):
            yield {"point": {"status": OK} | update["point"]} if "point" in update else update
        return
    device = resolve_device(line.spec.device)
    yield {"batch": first}
    yield {"say": f"{line.name}: loading"}
    side = opener(line.spec.replace(max_batch_size=first, max_seq_len=shape.longest))
    _check_quant(line, side.facts())
    check_fits(side, first, shape.longest)
    yield {"say": f"{line.name}: the machine's ceiling"}
    ceiling = measure_ceiling(device, side.dtype)
    for batch in wanted.batches:
        yield {"batch": batch}
        yield {"say": f"{line.name}: batch {batch}"}
        side.resize(batch)
        side.warm_up(batch)
        (entry,) = measure_latency(side, shape.replace(batches=(batch,)), ceiling)
        del entry["raw"]
        known = {"dtype": dtype_name(side.dtype), "facts": side.facts(), "ceiling": ceiling.to_json()}
        point = {"status": OK, "figures": entry, "memory": side.memory().to_json()}
        yield {"point": point | known | {"doubts": doubts([entry])}}


def _check_quant(line: SweepLine, facts: dict[str, Any]) -> None:
    """Raises:
    ConfigError: the side was loaded in another precision than the line's.
    """
    found = facts.get("quantization", "none")
    wanted = line.quant if line.is_stored else read_quant(line.quant).label
    if found != wanted:
        raise ConfigError(
            "the checkpoint was not loaded in the requested precision",
            seen=found,
            allowed=wanted,
            field="quant",
        )
