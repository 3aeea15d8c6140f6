"""What verify says of limits that are too wide to mean much."""

from __future__ import annotations

import pytest

from ingot.engine.proof import Floor, Metric
from ingot.engine.sketch import OVERFLOW
from ingot.llm.replay import FACTOR, Replay, _limits, is_weak, percent


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (1e-6, None),
        (0.0199, None),
        (0.0201, "less than 10 % of its size is not seen"),
        (0.19, "less than 95 % of its size is not seen"),
        (0.2, "cannot fail"),
        (3.0, "cannot fail"),
        (OVERFLOW, None),  # told as an overflow
    ],
)
def test_wide_limits_are_weak(logits: float, words: str | None) -> None:
    played = Replay()
    _limits(Floor({"layers.0": 1e-3, "norm": 0.02}, logits, 0.4), played)
    assert played.limits == {
        "logprobs": FACTOR * 0.4,
        "logits": FACTOR * logits,
        "modules, least": FACTOR * 1e-3,
        "modules, most": FACTOR * 0.02,
    }
    assert is_weak(played.limits) == (words is not None)
    if words is None:
        assert played.notes == []
    else:
        (note,) = played.notes
        assert note.startswith("weak: ")
        assert words in note
        assert "held to 0.5 %" in note


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (5.7e-6, "0.00057 %"),
        (0.0234, "2.3 %"),
        (0.2114, "21 %"),
        (0.996, "100 %"),
        (1.3766, "138 %"),
        (OVERFLOW, "1e+32 %"),
    ],
)
def test_a_limit_larger_than_what_it_limits_has_no_exponent(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("better", "limit", "met"),
    [("lower", 7.5, True), ("lower", 7.49, False), ("higher", 7.5, True), ("higher", 7.51, False)],
)
def test_a_metric_at_its_limit_meets_it(better: str, limit: float, met: bool) -> None:
    metric = Metric("perplexity", 7.5, limit, better, "wiki.jsonl", "00" * 32)  # type: ignore[arg-type]
    assert metric.met is met
    assert metric.replace(limit=None).met is None
