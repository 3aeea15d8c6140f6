"""Which of many choices no other beats in both respects.

Owns the rule. Knows nothing of what is compared.

    pareto([(15.9, 120.0), (16.2, 230.0), (17.0, 200.0)])      # costs and gains: [0, 1]
"""

from __future__ import annotations

from collections.abc import Sequence


def pareto(choices: Sequence[tuple[float, float]]) -> list[int]:
    """The places of the (cost, gain) pairs such that no other costs as little or less and gains as much or
    more, in order of cost. Of equal pairs the first stands for all.
    """
    order = sorted(range(len(choices)), key=lambda i: (choices[i][0], -choices[i][1], i))
    kept: list[int] = []
    for i in order:
        if not kept or choices[i][1] > choices[kept[-1]][1]:
            kept.append(i)
    return kept
