"""Which cases of a grid of parameters stay in ``make test``: a few that stand for the others.

Owns the choice behind two marks: those that are not chosen are marked ``slow``.
A value is what one ``parametrize`` gives, several names together included.

    @pytest.mark.grid       # every pair of two parameters' values is in some case that stays
    @pytest.mark.grid(1)    # every value is
    @pytest.mark.stays("gpt2", "gemma2")    # the cases of these ids; "-cpu" at an id's end is left out.
                                            # Beside it ``grid`` leaves none of them out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

_THINNED = pytest.StashKey[set[str]]()


def make_no_slow_cases(metafunc: pytest.Metafunc) -> None:
    """Where ``-m`` says "not slow", what ``mark_the_rest_slow`` would mark is not made in the first place,
    nor are cases of a GPU, where it says "not gpu": half of all cases.
    """
    function = metafunc.definition
    asked = function.config.option.markexpr
    if "not slow" not in asked or "gpu" in function.keywords:
        return
    cases = [_Case(function, call) for call in metafunc._calls]
    mark_the_rest_slow(cases)
    unasked = {name for name in ("gpu", "slow") if f"not {name}" in asked}
    kept = [case.callspec for case in cases if not unasked & case.keywords]
    if kept:  # without cases the test would be run without its parameters
        metafunc._calls[:] = kept
        function.config.stash.setdefault(_THINNED, set()).add(function.nodeid)


class _Case:
    """A case that is no item yet, with what is asked of items here."""

    def __init__(self, function: pytest.Function, call: Any) -> None:
        self.callspec, self.nodeid, self.config = call, f"{function.nodeid}[", function.config
        self.keywords = {mark.name for mark in call.marks}
        self.get_closest_marker, self.iter_markers = function.get_closest_marker, function.iter_markers

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.keywords.add(marker.name)


def mark_the_rest_slow(items: Sequence[pytest.Item | _Case]) -> None:
    """Of each test marked ``stays``, or ``grid``, by implementations (``impl``). Tests of a GPU all stay, and
    so does what ``make_no_slow_cases`` made.
    """
    for item in items:
        marker = None if "gpu" in item.keywords else item.get_closest_marker("stays")
        names = marker.args if marker is not None else None
        kind = isinstance(item, pytest.Function | _Case)
        if kind and names and item.callspec.id.removesuffix("-cpu") not in names:
            item.add_marker(pytest.mark.slow)
    grids: dict[tuple[str, str], list[tuple[dict[str, str], pytest.Function | _Case]]] = {}
    for item in items:
        # A mark, not a keyword: the name of the checkout's folder is a keyword too.
        is_grid = item.get_closest_marker("grid") is not None and "gpu" not in item.keywords
        is_grid &= item.get_closest_marker("stays") is None
        is_grid &= item.nodeid.partition("[")[0] not in item.config.stash.get(_THINNED, set())
        if isinstance(item, pytest.Function | _Case) and is_grid:
            values = values_of(item)
            test = item.nodeid.partition("[")[0], values.pop("impl", "")
            grids.setdefault(test, []).append((values, item))
    for cases in grids.values():
        marker = cases[0][1].get_closest_marker("grid")
        assert marker is not None
        kept = covering([values for values, _ in cases], *(marker.args or (2,)))
        for place, (_, item) in enumerate(cases):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


def values_of(item: pytest.Function | _Case) -> dict[str, str]:
    """What each ``parametrize`` of a test, and each fixture with parameters, gives this case."""
    given = {name: repr(value) for name, value in item.callspec.params.items()}
    values = dict(given)
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0] if isinstance(marker.args[0], str) else ",".join(marker.args[0])
        together = [name.strip() for name in names.split(",")]
        values[names] = ", ".join(given[name] for name in together)
        for name in set(together) - {names}:
            values.pop(name, None)
    return values


def covering(cases: Sequence[dict[str, str]], strength: int) -> set[int]:
    """Places of cases that have every ``strength`` values which any case has together; few, not fewest. Of
    equally good cases that whose values were taken least, so that short lists take turns.
    """
    taken: Counter[tuple[str, str]] = Counter()
    values = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing, kept = set().union(*values), set()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda place: (
                len(values[place] & missing),
                -sum(taken[one] for one in cases[place].items()),
            ),
        )
        taken.update(cases[best].items())
        missing -= values[best]
        kept.add(best)
    return kept
