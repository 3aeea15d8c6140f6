"""Every stage of an engine compared with the original's within limits, and the first bad one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.measure.align.first_divergence import Divergence
from ingot.measure.align.isolated_judge import MULTIPLE, Alone, AloneJudge
from ingot.measure.align.original import OriginalRun
from ingot.measure.align.stage_difference import (
    Difference,
    LogitsDifference,
    Statistics,
    measure,
    measure_logits,
    statistics,
)
from ingot.measure.align.stages.isolated_module import Isolated
from ingot.measure.align.stages.stage_names import StageFile, layer_of

SERVED = "served logits"


@dataclass(frozen=True)
class StageRow:
    """One stage of one step of one case.

    Attributes:
        difference: of the engine, run as a whole, from the reference.
        alone: of the stage's module run on the reference's input; None if the input is not recorded.
        floor: relative L2 between two runs of the reference that differ by rounding.
        eps: the noise if the floor is zero (``least_of``).
    """

    case: int
    step: int
    stage: str
    difference: Difference
    alone: Alone | None
    floor: float
    eps: float
    logits: LogitsDifference | None = None

    @property
    def limit(self) -> float:
        return MULTIPLE * self.floor + self.eps

    @property
    def is_bad(self) -> bool:
        """Whether the engine as a whole is beyond the limit here."""
        return not self.difference.relative <= self.limit

    @property
    def is_wrong_alone(self) -> bool:
        return self.alone is not None and self.alone.is_wrong


@dataclass(frozen=True)
class GreedyRow:
    """The greedy id after one step. ``is_bad``: it differs, by more than noise can move the logits."""

    case: int
    step: int
    expected: int
    got: int
    gap: float
    is_bad: bool


@dataclass(frozen=True)
class FirstBad:
    """The first bad stage: its row, whether its module is wrong by itself, both tensors' statistics."""

    row: StageRow
    alone: bool
    expected: Statistics
    got: Statistics
    position: int
    expected_value: float
    got_value: float


def compare_case(
    case: int, run: OriginalRun, engine: StageFile, judge: AloneJudge, eps: float
) -> list[StageRow]:
    """Every stage that both sides have, in order."""
    rows = []
    for stage in run.expected.stages():  # before steps: a layer's stages are computed once
        floor, _ = _floor(run.noise, stage)
        for step in range(run.expected.steps + 1):
            expected, got = run.expected.get(step, stage), engine.get(step, stage)
            if expected is None or got is None:
                continue
            logits = measure_logits(expected, got) if stage == "logits" else None
            apart = measure(expected, got)
            rows.append(StageRow(case, step, stage, apart, judge.of(step, stage), floor, eps, logits))
    return sorted(rows, key=lambda row: row.step)


def _floor(noise: tuple[StageFile, StageFile], stage: str) -> tuple[float, float]:
    """(relative L2, max-abs) between two runs that differ by rounding: the largest of all steps."""
    relative = max_abs = 0.0
    for step in range(noise[0].steps + 1):
        a, b = noise[0].get(step, stage), noise[1].get(step, stage)
        if a is not None and b is not None:
            found = measure(a, b)
            if math.isfinite(found.relative):
                relative, max_abs = max(relative, found.relative), max(max_abs, found.max_abs)
    return relative, max_abs


def compare_served(case: int, run: OriginalRun, served: StageFile, eps: float) -> list[StageRow]:
    """The logits of each step's last token, computed as requests are."""
    floor, _ = _floor(run.noise, "logits")
    rows = []
    for step in range(run.expected.steps + 1):
        expected, got = run.expected.get(step, "logits"), served.get(step, "logits")
        if expected is not None and got is not None:
            last, found = expected[-1:], got[-1:]
            logits = measure_logits(last, found)
            rows.append(StageRow(case, step, SERVED, measure(last, found), None, floor, eps, logits))
    return rows


def compare_greedy(case: int, run: OriginalRun, choices: Sequence[int], eps: float) -> list[GreedyRow]:
    """Greedy ids after each step. Another id is noise if the logits of the two are close enough."""
    _, floor = _floor(run.noise, "logits")
    rows = []
    for step, (expected, got) in enumerate(zip(run.choices, choices, strict=True)):
        logits = run.expected.get(step, "logits")
        gap = 0.0
        limit = math.inf
        if logits is not None:
            last = logits[-1].double()
            gap = float(last[expected] - last[got])
            limit = 2 * (MULTIPLE * floor + eps * float(last.abs().max()))
        rows.append(GreedyRow(case, step, expected, got, gap, expected != got and gap > limit))
    return rows


def first_bad(rows: Sequence[StageRow]) -> tuple[StageRow, bool] | None:
    """The row to name, and whether its module is wrong by itself.

    It is the first module that is wrong on the reference's own input, or if there is none the first stage at
    which the engine as a whole is beyond the limit.
    """
    alone = next((row for row in rows if row.is_wrong_alone), None)
    if alone is not None:
        return alone, True
    bad = next((row for row in rows if row.is_bad), None)
    return None if bad is None else (bad, False)


def look_at(row: StageRow, alone: bool, run: OriginalRun, engine: StageFile, judge: AloneJudge) -> FirstBad:
    """Both sides at the row's stage; of a module that is wrong alone at its place that is farthest off."""
    where: Difference = row.difference
    if alone and row.alone is not None:
        where, (expected, got) = row.alone, judge.sides(row.step, row.alone)
    else:
        stage, rows = ("logits", slice(-1, None)) if row.stage == SERVED else (row.stage, slice(None))
        wanted, had = run.expected.get(row.step, stage), engine.get(row.step, stage)
        assert wanted is not None
        assert had is not None
        expected, got = wanted[rows], had[rows]
    a, b = (tensor.flatten(1)[where.token, where.channel] for tensor in (expected, got))
    last = len(run.expected.ids(row.step)) - 1 if row.stage == SERVED else 0  # its only row
    position = run.expected.start(row.step) + last + where.token
    return FirstBad(row, alone, statistics(expected), statistics(got), position, float(a), float(b))


def evidence(
    first: StageRow,
    alone: bool,
    rows: Sequence[StageRow],
    run: OriginalRun,
    engine: StageFile,
    isolated: Isolated,
) -> list[Divergence]:
    """Input of the search for a cause: the modules that are wrong alone in the first one's layer and step,
    and the whole layer; if none is, the first bad stage and its layer as they ran.
    """
    layer = layer_of(first.stage)
    whole = None if layer is None else f"layers.{layer}"
    pairs = [(first.stage, first)]
    if alone:
        own = (row for row in rows if row.is_wrong_alone and row.step == first.step)
        pairs = [(row.stage, row) for row in own if layer_of(row.stage) == layer]
    found = []
    for stage, row in [*pairs, *([] if whole is None else [(whole, first)])]:
        got = isolated.module(row.step, stage) if alone else engine.get(row.step, _output(stage))
        floor = row.alone.limit / MULTIPLE if alone and row.alone is not None else row.floor
        inputs, expected = isolated.inputs(row.step, stage), run.expected.get(row.step, _output(stage))
        if inputs is None or expected is None or got is None:
            continue
        start = run.expected.start(row.step)
        positions = torch.arange(start, start + len(expected))
        found.append(Divergence(stage, layer_of(stage), row.step, positions, inputs, expected, got, floor))
    return found


def _output(stage: str) -> str:
    """The stage in a file; of a whole layer its output."""
    return f"{stage}.output" if stage == f"layers.{layer_of(stage)}" else stage
