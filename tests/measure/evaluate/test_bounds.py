"""Bounds on an engine's own scores: which are taken, what meets them, and the exit code."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ingot.errors import ConfigError
from ingot.measure.evaluate.eval_record import Evaluation
from ingot.measure.evaluate.eval_report import verdict
from ingot.measure.evaluate.score_bounds import ScoreBound, bounds_for, with_bounds
from tests.e2e.terminal import ingot
from tests.measure.evaluate.conftest import write, write_ids
from tests.tiny_models import random_ids


def test_a_score_at_its_bound_meets_it() -> None:
    least, most = ScoreBound("exact", 50.0, "higher"), ScoreBound("wer", 5.0, "lower")
    assert [least.met_by(score) for score in (49.99, 50.0, 50.01)] == [False, True, True]
    assert [most.met_by(score) for score in (4.99, 5.0, 5.01)] == [True, True, False]


@pytest.mark.parametrize("score", [None, math.nan, math.inf, -math.inf])
def test_a_score_that_is_none_or_not_finite_meets_none(score: float | None) -> None:
    assert not ScoreBound("exact", 0.0, "higher").met_by(score)
    assert not ScoreBound("wer", 1e9, "lower").met_by(score)


@pytest.mark.parametrize(
    ("verb", "at_least", "at_most"),
    [
        ("summarize", ["rouge1"], []),
        ("summarize", ["14"], []),
        ("summarize", ["rouge3=14"], []),
        ("summarize", ["rouge1="], []),
        ("summarize", ["rouge1=x"], []),
        ("summarize", ["rouge1=nan"], []),
        ("summarize", ["rouge1=-1"], []),
        ("summarize", ["rouge1=101"], []),
        ("perplexity", [], ["perplexity=inf"]),
        ("perplexity", [], ["wer=1"]),
    ],
)
def test_bounds_that_cannot_be(verb: str, at_least: list[str], at_most: list[str]) -> None:
    with pytest.raises(ConfigError, match="at_least" if at_least else "at_most"):
        bounds_for(verb, at_least, at_most)


def test_a_bound_on_the_wrong_side_names_the_other() -> None:
    with pytest.raises(ConfigError, match="at_most=wer=6"):
        bounds_for("wer", ["wer=6"])
    with pytest.raises(ConfigError, match="at_least=exact=6"):
        bounds_for("answers", [], ["exact=6"])


def test_both_verdicts_count() -> None:
    def evaluation(verdict: str | None) -> Evaluation:
        side = {"metrics": {"exact": 40.0, "contains": 60.0}}
        return Evaluation({"sides": [side], "verdict": verdict}, [])

    met, missed = bounds_for("answers", ["contains=60"]), bounds_for("answers", ["contains=60", "exact=41"])
    verdicts = {
        (before, len(bounds)): with_bounds(evaluation(before), bounds).record["verdict"]
        for before in (None, "within", "beyond")
        for bounds in ((), met, missed)
    }
    assert verdicts == {
        (None, 0): None,
        (None, 1): "within",
        (None, 2): "beyond",
        ("within", 0): "within",
        ("within", 1): "within",
        ("within", 2): "beyond",
        ("beyond", 0): "beyond",
        ("beyond", 1): "beyond",
        ("beyond", 2): "beyond",
    }


@pytest.mark.parametrize("against", [False, True])
def test_every_side_but_the_reference_is_bounded(against: bool) -> None:
    """A gate on an engine and its other precisions; the reference is what it is."""
    scores = {"fp16": 20.0, "hf": 3.0, "w8a16": 18.0, "w4a16": 9.0}
    sides = [{"name": name, "metrics": {"rouge1": score}} for name, score in scores.items()]
    sides = sides if against else [side for side in sides if side["name"] != "hf"]
    record = {"sides": sides, "deltas": [], "verdict": "within" if against else None}
    bounds = bounds_for("summarize", ["rouge1=14"])
    found = with_bounds(Evaluation(record, []), bounds, against=against).record
    judged = [(one["side"], one["score"], one["met"]) for one in found["bounds"]]
    assert judged == [("fp16", 20.0, True), ("w8a16", 18.0, True), ("w4a16", 9.0, False)]
    assert found["verdict"] == "beyond"
    assert verdict(found) == "not good enough: rouge1 of w4a16"
    met = with_bounds(Evaluation(record, []), bounds_for("summarize", ["rouge1=9"]), against=against).record
    assert met["verdict"] == "within"


def test_other_precisions_gate_too(chatter: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", {"prompt": "Ab", "answer": "no such thing"})
    words = ("eval", "answers", chatter, "--data", data, "--max-new-tokens", 4, "--device", "cpu")
    words = (*words, "--also", "w8a16", "--against", "hf", "--max-delta", 100)
    failed = ingot(*words, "--min", "exact=1")
    assert failed.exit_code == 1
    assert failed.stdout.count("BEYOND") == 2
    found = json.loads(ingot(*words, "--min", "exact=0", "--json").stdout)
    names = [side["name"] for side in found["sides"]]
    assert [one["side"] for one in found["bounds"]] == [names[0], names[2]]
    assert found["verdict"] == "within"


def test_the_exit_code_and_the_table(llama: Path, tmp_path: Path) -> None:
    words = ("eval", "perplexity", llama, "--data", write_ids(tmp_path / "a.jsonl", random_ids(40, seed=5)))
    words = (*words, "--device", "cpu", "--max")
    failed = ingot(*words, "perplexity=2", "--max", "nats_per_token=1e3")
    assert failed.exit_code == 1, failed.stderr
    assert "at most 2" in failed.stdout
    assert "not good enough: perplexity\n" in failed.stdout
    passed = ingot(*words, "perplexity=1e9", "--json")
    assert passed.exit_code == 0, passed.stderr
    found = json.loads(passed.stdout)
    assert found["verdict"] == "within"
    (bound,) = found["bounds"]
    assert bound["score"] == found["sides"][0]["metrics"]["perplexity"]
    assert bound["met"] is True


def test_an_answer_that_is_wrong_exits_with_1(chatter: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", {"prompt": "Ab", "answer": "no such thing"})
    words = ("eval", "answers", chatter, "--data", data, "--max-new-tokens", 4, "--device", "cpu")
    assert ingot(*words, "--min", "exact=1").exit_code == 1
    assert ingot(*words, "--min", "exact=0").exit_code == 0
    misused = ingot(*words, "--max", "exact=1")
    assert misused.exit_code == 2
    assert "--min exact=1" in misused.stderr
