"""How verify words a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.cli.verify import _limits
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


def test_a_limit_too_wide_to_catch_anything_names_the_page_that_explains_it() -> None:
    text = _limits({"logits": 0.21, "logprobs": 1.0, "modules, least": 0.1, "modules, most": 0.2})
    assert "by 21 % end to end: the proof rests on the steps (docs/proof.md#end-to-end)" in text
    assert "### End to end\n" in (Path(__file__).parents[2] / "docs" / "proof.md").read_text(encoding="utf-8")
    assert "docs/" not in _limits(
        {"logits": 0.1, "logprobs": 1.0, "modules, least": 0.1, "modules, most": 0.2}
    )
