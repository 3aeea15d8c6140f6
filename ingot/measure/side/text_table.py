"""Tables as plain data, and numbers as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_BETWEEN = 2  # spaces between two columns
_LEAST_NAME = 8  # characters of a name that was cut


@dataclass(frozen=True)
class Table:
    """A title, column names, and rows of text; the first column has names, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def narrow(table: Table, width: int) -> Iterator[Table]:
    """A table as parts of at most ``width`` characters, each with the names: columns without room are in the
    next part. Where there are several parts, names are cut to half the width, or to what a number leaves of
    it; rows without a number in a part are not in it.
    """
    first, *others = _widths(table)
    names = [line[0] for line in (table.columns, *table.rows)]
    if first + sum(_BETWEEN + other for other in others) > width:
        first = min(first, width // 2, max(width - _BETWEEN - max(others, default=0), _LEAST_NAME))
        names = [_cut(name, first) for name in names]
    begin, title = 1, table.title
    while begin == 1 or begin < len(table.columns):
        end, used = begin, first
        for other in others[begin - 1 :]:
            used += _BETWEEN + other
            if used > width and end > begin:
                break
            end += 1
        rows = zip(names[1:], (row[begin:end] for row in table.rows), strict=True)
        kept = tuple((name, *row) for name, row in rows if begin == 1 or any(row))
        yield Table(title, (names[0], *table.columns[begin:end]), kept)
        begin, title = max(end, begin + 1), "…"


def plain(table: Table) -> str:
    """The table as lines of aligned text."""
    lines = [table.columns, *table.rows]
    first, *others = _widths(table)
    between = " " * _BETWEEN
    texts = [between.join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) for line in lines]
    return "\n".join([table.title, *map(str.rstrip, texts)])


def _widths(table: Table) -> Iterator[int]:
    return (max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


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


def counted(count: float, what: str) -> str:
    """``1 token``, ``2 tokens``, ``1,715 tokens``; the mean of several counts is rounded."""
    text = f"{count:,.0f}"
    return f"{text} {what}" if text == "1" else f"{text} {what}s"


def _decimals(value: float | None, steps: tuple[int, ...]) -> str:
    """With one more decimal below each step, none from 1000 on."""
    if value is None:
        return "-"
    decimals = sum(abs(value) < step for step in (1000, *steps))
    return f"{value:.{decimals}f}" if decimals else f"{value:,.0f}"
