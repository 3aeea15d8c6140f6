"""Which choices no other one beats."""

from __future__ import annotations

from ingot.bench.sweep_record import pareto


def test_what_costs_more_must_gain_more() -> None:
    assert pareto([(3, 5), (1, 2), (2, 2), (2, 4), (4, 4)]) == [1, 3, 0]


def test_of_equal_choices_the_first_stands_for_all() -> None:
    assert pareto([(1, 2), (1, 2), (2, 2)]) == [0]
    assert pareto([]) == []
