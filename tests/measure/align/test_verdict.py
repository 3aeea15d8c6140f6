"""What is said of the first bad stage, on values made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.measure.align.align_report import report_html, verdict_text
from ingot.measure.align.align_session import Report
from ingot.measure.align.align_target import AlignCase
from ingot.measure.align.isolated_judge import Alone, AloneJudge
from ingot.measure.align.stage_difference import measure
from ingot.measure.align.stage_verdict import SERVED, GreedyRow, StageRow, look_at
from ingot.measure.align.stop_ids_check import StopCheck, explain_stops

STEPS = ([5, 6, 7, 8], [9], [10])  # tokens of the prompt and of two steps


class Stages:
    """A run in which a stage's values are those of its tokens' positions, but for one token of a step."""

    def __init__(self, step: int | None = None, token: int = 0) -> None:
        self._off = step, token

    def start(self, step: int) -> int:
        return sum(map(len, STEPS[:step]))

    def ids(self, step: int) -> list[int]:
        return STEPS[step]

    def get(self, step: int, stage: str) -> torch.Tensor:
        places = self.start(step) + torch.arange(len(STEPS[step]), dtype=torch.float32)
        values = places[:, None].repeat(1, 3)
        if self._off[0] == step:
            values[self._off[1], 2] += 100
        return values


@pytest.mark.parametrize(
    ("stage", "step", "token", "position"),
    [("norm", 0, 2, 2), ("norm", 1, 0, 4), ("norm", 2, 0, 5), (SERVED, 0, 3, 3), (SERVED, 2, 0, 5)],
)
def test_the_largest_difference_has_its_place_in_the_whole_text(
    stage: str, step: int, token: int, position: int
) -> None:
    """Also where logits are of each step's last token alone, as in the steps of requests."""
    expected, got = Stages(), Stages(step, token)
    rows = slice(-1, None) if stage == SERVED else slice(None)
    apart = measure(expected.get(step, stage)[rows], got.get(step, stage)[rows])
    run: Any = SimpleNamespace(expected=expected)
    other: Any = got
    judge: Any = None
    found = look_at(StageRow(0, step, stage, apart, None, 0.0, 1e-3), False, run, other, judge)
    assert found.position == position
    assert (found.expected_value, found.got_value) == (position, position + 100)


@pytest.mark.parametrize("on_grid", [True, False])
def test_a_module_is_shown_with_the_input_that_it_was_judged_on(on_grid: bool) -> None:
    judge: Any = AloneJudge.__new__(AloneJudge)
    outputs = {True: torch.ones(1, 2), False: torch.zeros(1, 2)}
    judge._on_grid = SimpleNamespace(run=lambda step, place: outputs[True])
    judge.isolated = SimpleNamespace(run=lambda step, place: outputs[False])
    judge._wanted = lambda step, place, *, on_grid: 2 + outputs[on_grid].double()
    apart = vars(measure(torch.ones(1, 2), torch.ones(1, 2)))
    alone = Alone(**apart, place="mlp", floor=0.0, limit=1.0, common=0.0, common_limit=1.0, on_grid=on_grid)
    expected, got = judge.sides(0, alone)
    assert (float(expected[0, 0]), float(got[0, 0])) == ((3.0, 1.0) if on_grid else (2.0, 0.0))


def reported(*greedy: GreedyRow) -> Report:
    """Of two prompts, with these greedy ids behind each."""
    apart = measure(torch.ones(1, 2), torch.ones(1, 2))
    rows = [StageRow(case, 0, "norm", apart, None, 0.0, 1e-3) for case in (0, 1)]
    cases, stops = [AlignCase("a", [1]), AlignCase("b", [2])], StopCheck(None, (9,), (), "the trace")
    return Report("e", "r", "n", "fp32", "cpu", 0, cases, rows, [*greedy], stops, None)


def test_every_prompt_of_the_page_has_its_own_greedy_ids() -> None:
    page = report_html(reported(GreedyRow(0, 0, 5, 5, 0.0, False), GreedyRow(1, 0, 7, 8, 0.1, False)))
    _, first, second = page.split("<h2>Prompt ")
    assert "the prompt: greedy id 5</summary>" in first
    assert "the prompt: greedy id 7, the engine&#39;s 8</summary>" in second


@pytest.mark.parametrize("is_bad", [True, False])
def test_other_greedy_ids_are_a_difference_by_themselves(is_bad: bool) -> None:
    """Where every stage is within its limit."""
    report = reported(GreedyRow(0, 0, 5, 5, 0.0, False), GreedyRow(1, 0, 7, 8, 0.1, is_bad))
    assert report.aligned is not is_bad
    assert report.first_stage == ("greedy ids" if is_bad else None)
    assert verdict_text(report) == ("diverged at greedy ids" if is_bad else "aligned")


def test_stop_ids_are_shown_where_each_side_ends() -> None:
    """The original's in its own answers, the engine's in those of the engine."""
    greedy = [GreedyRow(0, step, *ids, 0.0, False) for step, ids in enumerate([(4, 4), (2, 6), (3, 5)])]
    (found,) = explain_stops(StopCheck((2,), (5,), (), "the trace"), greedy)
    assert "(so here: the original's answer ends at step 1 of prompt 1)" in found.text
    assert "(so here: the engine's answer ends at step 2 of prompt 1)" in found.text
