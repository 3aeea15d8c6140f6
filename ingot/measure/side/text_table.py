"""Tables as plain data, and numbers as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A title, column names, and rows of text; the first column has names, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plain(table: Table) -> str:
    """The table as lines of aligned text."""
    lines = [table.columns, *table.rows]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    texts = ["  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in lines]
    return "\n".join([table.title, *texts])


def number(value: float | None) -> str:
    """A measured time or rate, to three or four digits: 0.912, 3.88, 147.5, 6,200; ``-`` for None."""
    return _decimals(value, (100, 1, 0))


def numbers(entry: Mapping[str, Any], paths: str) -> list[str]:
    """The numbers at space-separated paths such as ``ttft_ms.p50``; ``-`` for none."""
    found = []
    for path in paths.split():
        value: Any = entry
        for name in path.split("."):
            value = None if value is None else value[name]
        found.append(number(value))
    return found


def score(value: float | None) -> str:
    """A metric, to about four digits: 12.34, 0.0123, 1.20e-07; ``-`` for None."""
    if value is not None and 0 < abs(value) < 0.01:
        return f"{value:.2e}"
    return _decimals(value, (100, 10, 1, 0))


def percent(share: float | None) -> str:
    """0.871 → 87.1 %."""
    return "-" if share is None else f"{100 * share:.1f} %"


def times(ratio: float | None) -> str:
    """1.234 → 1.23x."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def _decimals(value: float | None, steps: tuple[int, ...]) -> str:
    """With one more decimal below each step, none from 1000 on."""
    if value is None:
        return "-"
    decimals = sum(abs(value) < step for step in (1000, *steps))
    return f"{value:.{decimals}f}" if decimals else f"{value:,.0f}"
