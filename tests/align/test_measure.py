"""The measures of a difference, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ingot.align.measure import measure, measure_logits, statistics


def test_every_token_weighs_the_same() -> None:
    expected = torch.tensor([[3000.0, 4000.0], [3.0, 4.0]])
    got = torch.tensor([[3000.0, 4000.0], [3.0, 6.5]])
    found = measure(expected, got)
    assert found.relative == pytest.approx(math.sqrt((0 + 0.5**2) / 2))
    assert (found.max_abs, found.token, found.channel) == (2.5, 1, 1)
    assert (measure(expected, expected).relative, measure(expected, expected).max_abs) == (0, 0)
    assert measure(expected, expected).cosine == pytest.approx(1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_on_one_side_is_an_infinite_difference(value: float) -> None:
    one, other = torch.ones(2, 3), torch.ones(2, 3)
    one[1, 2] = value
    for found in (measure(one, other), measure(other, one)):
        assert (found.max_abs, found.relative) == (math.inf, math.inf)
        assert (found.token, found.channel) == (1, 2)
    if math.isinf(value):
        assert measure(one, one).max_abs == 0


def test_divergence_is_from_the_expected_side() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.75, 0.25], [0.2, 0.8]])
    found = measure_logits(p.log(), q.log())
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()))
    assert found.kl != pytest.approx(float((q * (q / p).log()).sum(-1).mean()), rel=0.01)
    assert found.top1 == 0.5
    logits = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    assert measure_logits(logits, logits + 7).kl == pytest.approx(0, abs=1e-12)


def test_statistics_are_of_all_values() -> None:
    found = statistics(torch.tensor([[1.0, 3.0]], dtype=torch.float16))
    assert (found.shape, found.dtype, found.mean, found.std) == ((1, 2), "float16", 2.0, 1.0)
