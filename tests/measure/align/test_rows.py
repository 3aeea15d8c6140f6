"""The figures of a comparison's rows, its report and its evidence, each beside one computed by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.measure.align.align_report import (
    all_lines,
    alone_text,
    cells,
    report_html,
    report_json,
    share_of_limit,
    short_lines,
)
from ingot.measure.align.align_session import Report, _other_choices, _other_ids
from ingot.measure.align.align_target import AlignCase, TextCheck
from ingot.measure.align.isolated_judge import Alone
from ingot.measure.align.stage_difference import Difference, Statistics
from ingot.measure.align.stage_verdict import (
    SERVED,
    FirstBad,
    GreedyRow,
    StageRow,
    compare_case,
    compare_greedy,
    compare_served,
    evidence,
)
from ingot.measure.align.stages.stage_names import stage_names
from ingot.measure.align.stop_ids_check import StopCheck

STEPS = ([5, 6, 7], [8], [9])
EPS = 1e-3
Values = dict[tuple[int, str], torch.Tensor]


class Held:
    """A run's stages by step and name."""

    steps = len(STEPS) - 1

    def __init__(self, values: Values) -> None:
        self.values = values

    def stages(self) -> list[str]:
        return stage_names(2)

    def ids(self, step: int) -> list[int]:
        return STEPS[step]

    def start(self, step: int) -> int:
        return sum(map(len, STEPS[:step]))

    def get(self, step: int, stage: str) -> torch.Tensor | None:
        return self.values.get((step, stage))


def run_of(expected: Values, noise: Values, choices: list[int]) -> Any:
    exact = Held(expected)
    return SimpleNamespace(expected=exact, noise=(exact, Held(noise)), choices=choices, forced=choices[:-1])


def logits(*rows: float) -> dict[tuple[int, str], torch.Tensor]:
    """Of three ids behind each step: the last token's, below those of another token."""
    last = torch.tensor([[*rows]])
    return {
        (step, "logits"): torch.cat([last.flip(1)] * (len(ids) - 1) + [last])
        for step, ids in enumerate(STEPS)
    }


@pytest.mark.parametrize(("off", "is_bad"), [(0.99, False), (1.01, True)])
def test_another_greedy_id_is_noise_up_to_what_both_logits_may_move(off: float, is_bad: bool) -> None:
    """Four of the largest difference that rounding makes, a unit of the largest logit, for each of both."""
    noise, top = 0.5, 800.0
    gap = off * 2 * (4 * noise + EPS * top)
    expected = logits(top, top - gap, -9.0)
    moved = {key: value.clone() for key, value in expected.items()}
    moved[1, "logits"][0, 2] += noise
    found = compare_greedy(3, run_of(expected, moved, [0, 0, 0]), [0, 1, 0], EPS)
    assert [(one.case, one.step, one.expected, one.got) for one in found] == [
        (3, 0, 0, 0),
        (3, 1, 0, 1),
        (3, 2, 0, 0),
    ]
    assert [one.gap for one in found] == [0.0, pytest.approx(gap, rel=1e-4), 0.0]
    assert [one.is_bad for one in found] == [False, is_bad, False]


def test_no_logits_say_nothing_of_greedy_ids() -> None:
    (first, *_) = compare_greedy(0, run_of({}, {}, [1, 1, 1]), [2, 1, 1], EPS)
    assert (first.expected, first.got, first.is_bad) == (1, 2, False)


@pytest.mark.parametrize("infinite", [False, True])
def test_the_floor_is_the_largest_of_all_steps_and_each_step_has_its_own_difference(infinite: bool) -> None:
    stage, values = "layers.1.mlp", [torch.full((len(ids), 2), 4.0) for ids in STEPS]
    expected: Values = {(step, stage): value for step, value in enumerate(values)}
    noise = {key: value * (1 + (0.01, 0.03, 0.02)[key[0]]) for key, value in expected.items()}
    if infinite:
        noise[2, stage] = noise[2, stage] * math.inf
    got: Any = Held({key: value * (1 + (0.2, 0.1, 0.4)[key[0]]) for key, value in expected.items()})
    judge: Any = SimpleNamespace(of=lambda step, name: (step, name))
    found = compare_case(7, run_of(expected, noise, []), got, judge, EPS)
    assert [(one.case, one.step, one.stage, one.alone) for one in found] == [
        (7, step, stage, (step, stage)) for step in range(3)
    ]
    assert [one.floor for one in found] == [pytest.approx(0.03, rel=1e-5)] * 3
    assert [one.limit for one in found] == [pytest.approx(4 * 0.03 + EPS, rel=1e-5)] * 3
    assert [one.difference.relative for one in found] == pytest.approx([0.2, 0.1, 0.4], rel=1e-5)
    assert [one.is_bad for one in found] == [True, False, True]


def test_served_logits_are_those_of_each_step_s_last_token() -> None:
    expected = logits(3.0, 4.0, 0.0)
    noise = {key: value * 1.01 for key, value in expected.items()}
    served: Any = Held({key: value[-1:] * 1.5 for key, value in expected.items()})
    found = compare_served(2, run_of(expected, noise, []), served, EPS)
    assert [(one.case, one.step, one.stage, one.alone) for one in found] == [
        (2, s, SERVED, None) for s in range(3)
    ]
    for one in found:
        assert one.difference.relative == pytest.approx(0.5)
        assert one.floor == pytest.approx(0.01, rel=1e-4)
        assert one.eps == EPS
        assert one.logits is not None
        assert one.logits.top1 == 1.0
        p, q = (torch.tensor([3.0, 4.0, 0.0]) * factor for factor in (1.0, 1.5))
        kl = float((p.softmax(0) * (p.log_softmax(0) - q.log_softmax(0))).sum())
        assert one.logits.kl == pytest.approx(kl, rel=1e-5)


def alone_of(limit: float, relative: float, place: str) -> Alone:
    return Alone(
        max_abs=11.0, relative=relative, cosine=0.12, token=1, channel=13, place=place,
        floor=0.14, limit=limit, common=0.15, common_limit=0.9,
    )  # fmt: skip


def row_of(stage: str, step: int, alone: Alone | None) -> StageRow:
    apart = Difference(max_abs=21.0, relative=0.22, cosine=0.23, token=2, channel=24)
    return StageRow(5, step, stage, apart, alone, floor=0.25, eps=EPS)


def first_of(row: StageRow, alone: bool) -> FirstBad:
    expected, got = (Statistics((3, 4), name, 1.0, 2.0, 3.0, 4.0) for name in ("float32", "float16"))
    return FirstBad(row, alone, expected, got, position=31, expected_value=32.0, got_value=33.0)


@pytest.mark.parametrize("alone", [True, False])
def test_the_json_of_a_row_and_of_the_first_bad_stage(alone: bool) -> None:
    """The figures of the whole run beside those of the module alone; the place is of one of them."""
    row = row_of("layers.0.mlp", 2, alone_of(0.4, 0.5, "layers.0.inner"))
    stops = StopCheck(None, (9,), (), "the trace")
    facts = ("e", "r", "n", "fp32", "cpu", 2)
    report = Report(*facts, [AlignCase("a", [1])], [row], [], stops, first_of(row, alone))
    reported = report_json(report)
    (one,), first = reported["rows"], reported["first"]
    assert (one["case"], one["step"], one["stage"]) == (5, 2, "layers.0.mlp")
    assert one["difference"] == {"max_abs": 21.0, "relative": 0.22, "cosine": 0.23, "token": 2, "channel": 24}
    assert {name: one["alone"][name] for name in one["difference"]} == {
        "max_abs": 11.0, "relative": 0.5, "cosine": 0.12, "token": 1, "channel": 13,
    }  # fmt: skip
    assert (one["floor"], one["limit"], one["eps"]) == (0.25, pytest.approx(1.001), EPS)
    assert (one["alone_floor"], one["alone_limit"]) == (0.14, 0.4)
    assert (one["bad"], one["wrong_alone"]) == (False, True)
    assert (first["case"], first["step"], first["wrong_alone"]) == (5, 2, alone)
    assert (first["token"], first["channel"]) == ((1, 13) if alone else (2, 24))
    assert (first["position"], first["expected_value"], first["got_value"]) == (31, 32.0, 33.0)
    assert (first["expected"]["dtype"], first["got"]["dtype"]) == ("float32", "float16")
    assert ("5.00e-01 (limit 4.00e-01)" if alone else "2.20e-01 here (limit 1.00e+00)") in first["why"]
    facts_reported = [reported[name] for name in ("engine", "reference", "noise", "dtype", "device", "steps")]
    assert facts_reported == [*facts]


def test_a_row_without_a_module_has_no_figures_of_one() -> None:
    row = row_of("layers.0.mlp", 0, None)
    reported = report_json(
        Report("e", "r", "n", "fp32", "cpu", 0, [], [row], [], StopCheck(None, (), (), "t"), None)
    )
    assert [reported["rows"][0][name] for name in ("alone", "alone_floor", "alone_limit")] == [None] * 3
    assert cells(row) == ["2.10e+01", "2.20e-01", "", "2.50e-01", "1.00e+00", "0.230000"]
    assert share_of_limit(row) == pytest.approx(0.22 / 1.001)


def test_the_cells_of_a_row_and_its_share() -> None:
    row = row_of("layers.0.mlp", 0, alone_of(0.4, 0.5, "layers.0.mlp"))
    assert cells(row) == ["2.10e+01", "2.20e-01", "5.00e-01", "2.50e-01", "1.00e+00", "0.230000"]
    assert share_of_limit(row) == pytest.approx(0.5 / 0.4)
    assert share_of_limit(row_of("x", 0, alone_of(9.0, 0.5, "x"))) == pytest.approx(0.22 / 1.001)


def test_the_page_shows_each_step_s_figures_and_opens_those_that_are_bad() -> None:
    fine = row_of("layers.0.mlp", 0, None)
    beyond = StageRow(0, 0, "norm", replace(fine.difference, relative=2.002), None, floor=0.25, eps=EPS)
    wrong = row_of("layers.0.mlp", 0, alone_of(0.4, 0.5, "layers.0.mlp"))
    steps = [fine, fine, beyond, wrong]
    rows = [replace(row, case=0, step=step) for step, row in enumerate(steps)]
    cases, stops = [AlignCase("a", [1])], StopCheck(None, (), (), "t")
    page = report_html(Report("e", "r", "n", "fp32", "cpu", 3, cases, rows, [], stops, None))
    _, *found = page.split("<details")
    assert [part.startswith(" open>") for part in found] == [True, False, True, True]
    for step, (row, part) in enumerate(zip(rows, found, strict=True)):
        assert f"<summary>{f'decode step {step}' if step else 'the prompt'}</summary>" in part
        assert part.count('<tr class="bad">') == (step > 1)
        reported = re.findall("<td>([^<]*)</td>", part)
        assert reported == [row.stage, *cells(row)]
        share = row.difference.relative / row.limit
        assert f'style="width:{int(share * 40)}px"></span> {share:.2g}</td>' in part


def table(rows: list[StageRow], first: FirstBad | None) -> list[tuple[str, str]]:
    return [("…" if line.row is None else line.row.stage, line.note) for line in short_lines(rows, first)]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((), "2 earlier stages within the limits"),
        ((0,), "2 earlier stages, 1 of them beyond the limits"),
        ((0, 1), "2 earlier stages beyond the limits too"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_stages_that_are_left_out_are_counted(wrong: tuple[int, ...], says: str, alone: bool) -> None:
    """Beyond a limit of the whole or of the module alone."""

    def row(at: int, stage: str) -> StageRow:
        found = row_of(stage, 0, alone_of(0.4, 0.5, stage) if alone and at in wrong else None)
        return (
            found
            if alone or at not in wrong
            else replace(found, difference=replace(found.difference, relative=9))
        )

    rows = [row(at, f"layers.0.{letter}") for at, letter in enumerate("abcdefgh")] + [row(9, "logits")]
    assert table(rows, first_of(rows[5], False)) == [
        ("…", says),
        *((f"layers.0.{letter}", "") for letter in "cdef"),
        ("…", "2 later stages within the limits"),
        ("logits", ""),
    ]
    assert table(rows[:1] + rows[8:], first_of(rows[8], False))[-1] == ("logits", "")


def test_the_first_step_is_shown_beside_the_worst() -> None:
    fine, first = row_of("layers.0.a", 0, None), row_of("layers.0.b", 1, alone_of(0.4, 0.5, "b"))
    worst = replace(first, step=2, alone=alone_of(0.4, 0.8, "b"))
    rows = [fine, first, worst]
    assert table(rows, first_of(first, True)) == [
        ("layers.0.a", ""),
        ("layers.0.b", ""),
        ("layers.0.b", "its worst step"),
    ]
    near = replace(first, step=2, alone=alone_of(0.4, 0.502, "b"))
    assert table([fine, first, near], first_of(first, True)) == [("layers.0.a", ""), ("layers.0.b", "")]
    shown = [line.row.step for line in all_lines(rows) if line.row is not None]
    assert shown == [0, 2]


def test_without_a_bad_stage_the_worst_of_each_kind_is_shown() -> None:
    rows = [
        *(row_of(f"layers.{layer}.mlp", step, None) for step in (0, 1) for layer in (0, 1, 2)),
        row_of("encoder.layers.0.mlp", 0, None),
        row_of("norm", 0, None),
    ]
    rows[4] = replace(rows[4], difference=replace(rows[4].difference, relative=0.3))
    assert table(rows, None) == [
        ("layers.1.mlp", "worst of 3 layers"),
        ("encoder.layers.0.mlp", ""),
        ("norm", ""),
    ]


@pytest.mark.parametrize(
    ("place", "changes", "says"),
    [
        ("layers.0.mlp", {}, "it is off by 5.00e-01 (limit 4.00e-01)."),
        ("layers.0.inner", {}, "it is, before its down product, off by 5.00e-01 (limit 4.00e-01)."),
        ("layers.0.query", {}, "it is, in its queries, off by"),
        (
            *("layers.0.keys", {"relative": 0.3, "common": 0.95}),
            "it is, in its keys, off in what many values have in common, by 9.50e-01 (limit 9.00e-01).",
        ),
        ("layers.0.mlp", {"of_config": True}, "in fp32, they are off by 5.00e-01 (limit 4.00e-01)."),
    ],
)
def test_in_what_a_module_is_wrong(place: str, changes: dict[str, Any], says: str) -> None:
    assert says in alone_text(replace(alone_of(0.4, 0.5, place), **changes))


class Modules:
    """What each module reads and gives; the values tell which."""

    def inputs(self, step: int, stage: str) -> torch.Tensor:
        return torch.full((1, 2), 100.0 + step + len(stage))

    def module(self, step: int, stage: str) -> torch.Tensor:
        return torch.full((1, 2), 200.0 + step + len(stage))


def asked(rows: list[StageRow], first: StageRow, alone: bool) -> list[Any]:
    stages = {row.stage for row in rows} | {"layers.1.output"}
    expected = {
        (step, name): torch.full((len(ids), 2), float(step))
        for step, ids in enumerate(STEPS)
        for name in stages
    }
    engine: Any = Held({key: value + 300 for key, value in expected.items()})
    modules: Any = Modules()
    return evidence(first, alone, rows, run_of(expected, {}, []), engine, modules)


def test_modules_that_are_wrong_alone_are_asked_in_their_layer_and_step_and_then_the_layer() -> None:
    wrong = {name: alone_of(0.4, 0.5, name) for name in ("layers.1.attention", "layers.1.mlp")}
    rows = [
        row_of("layers.0.mlp", 1, alone_of(0.4, 0.3, "layers.0.mlp")),
        row_of("layers.1.input_norm", 1, alone_of(0.4, 0.3, "layers.1.input_norm")),
        row_of("layers.1.attention", 1, wrong["layers.1.attention"]),
        row_of("layers.1.mlp", 1, alone_of(0.8, 0.9, "layers.1.mlp")),
        row_of("final_norm", 1, alone_of(0.4, 0.5, "final_norm")),
        row_of("layers.1.attention", 2, wrong["layers.1.attention"]),
        row_of("layers.1.mlp", 2, wrong["layers.1.mlp"]),
    ]
    found = asked(rows, rows[2], True)
    assert [(one.stage, one.layer, one.step) for one in found] == [
        (name, 1, 1) for name in ("layers.1.attention", "layers.1.mlp", "layers.1")
    ]
    assert [one.floor for one in found] == [0.1, 0.2, 0.1], "a quarter of the module's own limit"
    for one in found:
        assert one.positions.tolist() == [3]
        assert float(one.inputs[0, 0]) == 101 + len(one.stage)
        assert float(one.got[0, 0]) == 201 + len(one.stage), "of the module by itself"
        assert float(one.expected[0, 0]) == 1


@pytest.mark.parametrize(
    ("stage", "stages"), [("layers.1.mlp", ["layers.1.mlp", "layers.1"]), ("logits", ["logits"])]
)
def test_a_stage_that_no_module_explains_is_asked_as_it_ran(stage: str, stages: list[str]) -> None:
    rows = [row_of("layers.1.attention", 0, None), row_of(stage, 0, alone_of(0.4, 0.3, stage))]
    found = asked(rows, rows[1], False)
    assert [one.stage for one in found] == stages
    for one in found:
        assert one.positions.tolist() == [0, 1, 2]
        assert one.floor == 0.25
        assert float(one.got[0, 0]) == 300, "of the engine as a whole"


def test_greedy_ids_of_the_first_prompt_that_has_others_are_asked() -> None:
    """All of its steps, and of no other prompt."""
    greedy = [
        GreedyRow(0, 0, 1, 1, 0.0, False), GreedyRow(0, 1, 2, 3, 0.0, False),
        GreedyRow(1, 0, 4, 4, 0.0, False), GreedyRow(1, 1, 5, 6, 9.0, True),
        GreedyRow(2, 0, 7, 8, 9.0, True),
    ]  # fmt: skip
    (one,) = _other_choices(greedy)
    assert (one.stage, one.layer, one.step) == ("greedy", None, 0)
    assert (one.expected.tolist(), one.got.tolist(), one.positions.tolist()) == ([4, 5], [4, 6], [0, 1])
    assert _other_choices(greedy[:3]) == []


def test_the_first_token_ids_that_differ_are_asked() -> None:
    texts = TextCheck("rendered prompt", "a", "b", "x")
    ids = [TextCheck("token ids", [1, 2], [1, 2], "x"), TextCheck("token ids", [3, 4], [4], "x")]
    cases = [
        AlignCase("a", [1, 2], (texts, ids[0])),
        AlignCase("b", [3, 4], (texts, ids[1])),
        AlignCase("c", [5], (ids[1],)),
    ]
    (one,) = _other_ids(cases)
    assert (one.stage, one.expected.tolist(), one.got.tolist()) == ("ids", [3, 4], [4])
    assert _other_ids(cases[:1]) == []
