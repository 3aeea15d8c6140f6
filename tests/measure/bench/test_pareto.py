"""Which choices no other one beats."""

from __future__ import annotations

import pytest

from ingot.measure.bench.sweep.sweep_record import pareto


@pytest.mark.parametrize(
    ("choices", "kept"),
    [
        ([], []),
        ([(3, 5), (1, 2), (2, 2), (2, 4), (4, 4)], [1, 3, 0]),  # what costs more must gain more
        ([(1, 2), (1, 2), (2, 2)], [0]),  # of equal ones the first stands for all
        ([(2, 5), (1, 5), (1, 5)], [1]),
        ([(3, 9), (1, 1), (2, 4)], [1, 2, 0]),
    ],
)
def test_pareto_keeps_what_nothing_beats(choices: list[tuple[float, float]], kept: list[int]) -> None:
    assert pareto(choices) == kept
