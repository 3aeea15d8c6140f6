"""Which stages a short report shows.

Owns the choice: of an aligned engine the furthest out of each kind of stage, of a diverged one the first bad
stage and its surroundings. Knows no terminal.

    for line in short_lines(report.rows, report.first): print(line.row, line.note)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ingot.align.stages import kind_of
from ingot.align.verdict import SERVED, FirstBad, Row

BEFORE = 3  # stages shown before the first bad one
NOTABLY = 1.01  # so much further out another step of it is shown beside the first
_ENDS = ("logits", SERVED)  # what a divergence does to them is always shown


@dataclass(frozen=True)
class Line:
    """A stage, or without a row the stages that are left out; ``note`` says what it stands for."""

    row: Row | None
    note: str = ""


def all_lines(rows: Sequence[Row]) -> list[Line]:
    """Every stage by the step and prompt that is furthest out."""
    return [Line(row) for row in _furthest(rows, lambda row: row.stage)]


def short_lines(rows: Sequence[Row], first: FirstBad | None) -> list[Line]:
    if first is None:
        return list(_by_kind(rows))
    return list(_around(_furthest(rows, lambda row: row.stage), first.row))


def share_of_limit(row: Row) -> float:
    """How far out a row is: 1 is at its limit, of the whole or of the module alone."""
    alone = 0.0 if row.alone is None else row.alone.relative / row.alone_limit
    return max(row.difference.relative / row.limit, alone)


def _furthest(rows: Sequence[Row], key: Callable[[Row], str]) -> list[Row]:
    """For every key the row that is furthest beyond its limit, in order of first appearance."""
    found: dict[str, Row] = {}
    for row in rows:
        best = found.get(key(row))
        if best is None or share_of_limit(row) > share_of_limit(best):
            found[key(row)] = row
    return list(found.values())


def _by_kind(rows: Sequence[Row]) -> Iterator[Line]:
    for row in _furthest(rows, lambda row: kind_of(row.stage)):
        count = len({other.stage for other in rows if kind_of(other.stage) == kind_of(row.stage)})
        yield Line(row, f"worst of {count} layers" if count > 1 else "")


def _around(stages: Sequence[Row], first: Row) -> Iterator[Line]:
    """The last stages before the first bad one, itself, and the logits."""
    at = next(i for i, row in enumerate(stages) if row.stage == first.stage)
    start = max(at - BEFORE, 0)
    yield from _fold(stages[:start], "earlier")
    yield from (Line(row) for row in stages[start:at])
    yield Line(first)
    worst = stages[at]
    if share_of_limit(worst) > NOTABLY * share_of_limit(first):
        yield Line(worst, "its worst step")
    later = stages[at + 1 :]
    yield from _fold([row for row in later if row.stage not in _ENDS], "later")
    yield from (Line(row) for row in later if row.stage in _ENDS)


def _fold(stages: Sequence[Row], side: str) -> Iterator[Line]:
    bad = sum(row.is_bad or row.is_wrong_alone for row in stages)
    if not stages:
        return
    count = f"{len(stages)} {side} stage{'s' if len(stages) > 1 else ''}"
    if not bad:
        yield Line(None, f"{count} within the limits")
    elif bad == len(stages):
        yield Line(None, f"{count} beyond the limits too")
    else:
        yield Line(None, f"{count}, {bad} of them beyond the limits")
