"""How verify words a limit."""

from __future__ import annotations

import pytest

from ingot.engine.proof_file import Metric
from ingot.engine.sketch import OVERFLOW
from ingot.proof.golden_replay import percent


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
