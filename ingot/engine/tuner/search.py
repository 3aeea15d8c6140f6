"""Which candidate wins: compiled ahead, right, and faster by more than noise.

Owns the order of work and the decision. Knows no op: cases launch, a timer measures.

    outcome = Search(GraphTimer(), torch.device("cuda")).run(tasks, make_case)
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from triton.errors import TritonError

from ingot.config.plan import KernelPlan, Machine, Measured
from ingot.device import on_device
from ingot.engine.tuner.cases import Case, Tiles, Written, poison, spread
from ingot.engine.tuner.timing import Measure, Timer, averaged
from ingot.engine.tuner.workload import Task
from ingot.errors import DeviceError

MARGIN = 0.015  # a candidate must be this much faster than the default: less is noise
CALLS = 32  # in a graph, at least
GLANCES = 3  # replays of every candidate
ROUNDS = 7  # replays of each finalist's captures, in turn with the others
CAPTURES = 3
FINALISTS = 3
MOST_THREADS = 16
# What a candidate may raise: tiles that Triton cannot compile or the GPU cannot launch.
CANDIDATE_ERRORS = (TritonError, RuntimeError, ValueError)
# Distance from the default's result, in units of |result| + its root mean square: another order of sums.
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}

Progress = Callable[[str, int, int], None]
MakeCase = Callable[[Task, int], Case]


@dataclass(frozen=True)
class Dropped:
    """A candidate that did not take part, and why."""

    op: str
    key: str
    tiles: Tiles
    reason: str


@dataclass(frozen=True)
class Choice:
    """The tiles of one task; ``tiles`` is None where the default stays.

    Times are means over the task's numbers of rows. ``finalists`` are the best of the other candidates, with
    their times, as far as they are not slower than the default.
    """

    task: Task
    tiles: Tiles | None
    default_us: float
    best_us: float
    finalists: tuple[tuple[Tiles, float], ...] = ()

    def taking(self, tiles: Tiles | None) -> Choice:
        """The same with one of the finalists, or with the default."""
        us = self.default_us if tiles is None else next(us for t, us in self.finalists if t == tiles)
        return replace(self, tiles=tiles, best_us=us)


@dataclass
class Outcome:
    """What a search found: a choice a task, candidates that failed or were wrong, and the seconds that
    compiling took.
    """

    choices: list[Choice]
    dropped: list[Dropped]
    compile_seconds: float


@dataclass
class _Entry:
    """A task with its cases (one a number of rows) and the candidates still in the race."""

    task: Task
    cases: list[Case]
    candidates: list[Tiles]


class Search:
    """Tunes tasks one after another; everything is compiled before the first is timed."""

    def __init__(self, timer: Timer, device: torch.device, progress: Progress | None = None) -> None:
        self._timer = timer
        self._device = device
        self._progress = progress or (lambda what, done, total: None)
        self._dropped: list[Dropped] = []

    def run(self, tasks: Sequence[Task], make_case: MakeCase) -> Outcome:
        """Choose tiles for every task; ``make_case`` gives its case for a number of rows.

        Raises:
            DeviceError: a default fails.
            torch.AcceleratorError: a candidate left the GPU unusable.
        """
        entries = [_entry(task, make_case) for task in tasks]
        start = time.perf_counter()
        self._compile(entries)
        compile_seconds = time.perf_counter() - start
        choices = []
        for done, entry in enumerate(entries):
            self._progress(f"timing {entry.task.op} {entry.task.key}", done, len(entries))
            self._drop_wrong(entry)
            choices.append(self._choose(entry))
        return Outcome(choices, self._dropped, compile_seconds)

    def _compile(self, entries: list[_Entry]) -> None:
        """Launch every candidate once, on threads: most of a compilation runs outside of Python's lock."""
        threads = min(MOST_THREADS, os.cpu_count() or 1) if self._device.type == "cuda" else 1
        with ThreadPoolExecutor(threads) as pool:
            jobs = [
                (entry, tiles, pool.submit(self._launch, case, tiles))
                for entry in entries
                for tiles in entry.candidates
                for case in entry.cases
            ]
            for done, (entry, tiles, job) in enumerate(jobs):
                self._progress(f"compiling {entry.task.op} {entry.task.key}", done, len(jobs))
                self._settle(entry, tiles, job)
        self._synchronize()

    def _launch(self, case: Case, tiles: Tiles) -> None:
        with torch.inference_mode(), on_device(self._device):
            case.launch(0, tiles)

    def _settle(self, entry: _Entry, tiles: Tiles, job: Future[None]) -> None:
        """Drop a candidate that failed; a default must not fail."""
        try:
            job.result()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except CANDIDATE_ERRORS as error:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if tiles == entry.candidates[0]:
                op = f"{entry.task.op} {entry.task.key}"
                raise DeviceError(
                    "an op's default tiles do not run on this GPU", seen=f"{op}: {reason}"
                ) from error
            self._drop(entry, tiles, reason)

    def _drop_wrong(self, entry: _Entry) -> None:
        """Drop candidates whose result is not the default's."""
        for case in entry.cases:
            default = entry.candidates[0]
            expected = written(case, default, case.launch(0, default))
            for tiles in [t for t in entry.candidates if t != default]:
                if not agrees(written(case, tiles, expected), expected):
                    self._drop(entry, tiles, "its result differs from the default's")

    def _drop(self, entry: _Entry, tiles: Tiles, reason: str) -> None:
        if tiles in entry.candidates:
            entry.candidates.remove(tiles)
            self._dropped.append(Dropped(entry.task.op, entry.task.key, tiles, reason))

    def _choose(self, entry: _Entry) -> Choice:
        """Glance at all candidates, then time the best ones in turn with the default."""
        glances = timed([self._clocks(entry, tiles, 1) for tiles in entry.candidates], GLANCES)
        order = sorted(range(len(glances)), key=lambda i: relative(glances[i], glances[0]))
        finalists = [0, *[i for i in order if i][:FINALISTS]]
        times = timed([self._clocks(entry, entry.candidates[i], CAPTURES) for i in finalists], ROUNDS)
        ratios = [relative(one, times[0]) for one in times]
        others = tuple(
            (entry.candidates[i], statistics.fmean(one))
            for i, one, ratio in zip(finalists, times, ratios, strict=True)
            if i and ratio < 1 + MARGIN / 2
        )
        us = statistics.fmean(times[0])
        best = finalists[decide(ratios, MARGIN)]
        return Choice(entry.task, None, us, us, others).taking(entry.candidates[best] if best else None)

    def _clocks(self, entry: _Entry, tiles: Tiles, captures: int) -> list[Measure]:
        """One clock a case."""
        clocks = []
        for case in entry.cases:
            copies = spread(case.copies, max(case.copies, CALLS))
            calls = [partial(case.launch, copy, tiles) for copy in copies]
            clocks.append(averaged(self._timer, calls, captures))
        return clocks

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def timed(clocks: Sequence[Sequence[Measure]], rounds: int) -> list[list[float]]:
    """Median microseconds of every candidate's cases; candidates take turns, so that drift hits all alike."""
    seen = [[[] for _ in cases] for cases in clocks]  # type: list[list[list[float]]]
    for _ in range(rounds):
        for candidate, cases in zip(seen, clocks, strict=True):
            for times, clock in zip(candidate, cases, strict=True):
                times.append(clock())
    return [[statistics.median(times) for times in candidate] for candidate in seen]


def relative(times: Sequence[float], default: Sequence[float]) -> float:
    """Geometric mean of a candidate's times over the default's."""
    return statistics.geometric_mean([a / b for a, b in zip(times, default, strict=True)])


def decide(ratios: Sequence[float], margin: float) -> int:
    """Index of the winner among times relative to the default (index 0), which stays within the margin."""
    best = min(range(len(ratios)), key=lambda i: ratios[i])
    return best if ratios[best] < 1 - margin else 0


def plan_of(choices: Iterable[Choice], machine: Machine) -> KernelPlan:
    """The plan that the choices make."""
    tiles: dict[str, dict[str, dict[str, int]]] = {}
    measured: dict[str, dict[str, Measured]] = {}
    for choice in choices:
        op, key = choice.task.op, choice.task.key
        times = Measured(round(choice.default_us, 2), round(choice.best_us, 2))
        measured.setdefault(op, {})[key] = times
        if choice.tiles is not None:
            tiles.setdefault(op, {})[key] = dict(choice.tiles)
    return KernelPlan(
        machine.gpu, machine.capability, machine.value_bytes, machine.torch, machine.triton, tiles, measured
    )


def written(case: Case, tiles: Tiles, like: Written) -> Written:
    """What the op writes with these tiles, over NaN."""
    poison(case, like)
    return tuple(tensor.clone() for tensor in case.launch(0, tiles))


def agrees(results: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    """Whether results are equal within their dtype's tolerance; NaN (what neither writes) equals NaN."""
    for result, wanted in zip(results, expected, strict=True):
        wide = wanted.float()
        scale = wide.abs() + wide.nan_to_num().square().mean().sqrt()
        near = (result.float() - wide).abs() <= TOLERANCES[wanted.dtype] * scale
        if not bool((near | (result.isnan() & wanted.isnan())).all()):
            return False
    return True


def _entry(task: Task, make_case: MakeCase) -> _Entry:
    cases = [make_case(task, rows) for rows in task.rows]
    assert all(case.candidates[0] == cases[0].candidates[0] for case in cases), task
    candidates = [
        tiles for i, tiles in enumerate(cases[0].candidates) if tiles not in cases[0].candidates[:i]
    ]
    return _Entry(task, cases, candidates)
