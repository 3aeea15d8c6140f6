"""The README's support tables, from docs/support.toml.

Owns what a cell names and how it is shown. Runs no test.

    python -m tests.support.matrix      # rewrite the README
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA, README = ROOT / "docs/support.toml", ROOT / "README.md"
BLOCK = re.compile(r"(<!-- support -->\n)(.*?)(<!-- support end -->)", re.S)
REFUSED, RESULTS = "no: ", "docs/results/"


@dataclass(frozen=True)
class Cell:
    """What one cell of a table stands on: a test's id, or a file of results."""

    table: str
    row: str
    column: str
    named: str

    @property
    def test(self) -> str | None:
        return None if self.named.startswith(RESULTS) else self.named.removeprefix(REFUSED)

    @property
    def shown(self) -> str:
        if self.named.startswith(RESULTS):
            return "GPU"
        return "no" if self.named.startswith(REFUSED) else "✓"


def tables(data: Path = DATA) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(data.read_text(encoding="utf-8"))["table"]
    return found


def cells(table: dict[str, Any]) -> Iterator[Cell]:
    """Those that are not empty; ``test`` is the id of all that are not named one by one.

    Raises:
        KeyError: a cell is of no row or column.
    """
    named = table.get("cells", {})
    unknown = set(named) - set(table["columns"]) | {r for c in named.values() for r in c} - set(table["rows"])
    if unknown:
        raise KeyError(f"{table['title']}: no such row or column: {sorted(unknown)}")
    for row in table["rows"]:
        for column in table["columns"]:
            text = table.get("test") if column not in named else named[column].get(row)
            if text:
                yield Cell(table["title"], row, column, text.format(row=row, column=column))


def markdown(table: dict[str, Any]) -> str:
    """A title and the table."""
    shown = {(cell.row, cell.column): cell.shown for cell in cells(table)}
    lines = [[table["corner"], *table["columns"].values()], ["---"] * (1 + len(table["columns"]))]
    for row, label in table["rows"].items():
        lines.append([label, *(shown.get((row, column), "") for column in table["columns"])])
    rendered = (f"|{'|'.join(f' {one} ' if one else ' ' for one in line)}|" for line in lines)
    return "\n".join([f"**{table['title']}**", "", *rendered, ""])


def block() -> str:
    """All tables, as they stand in the README."""
    return "\n" + "\n".join(map(markdown, tables())) + "\n"


def rewritten(text: str) -> str:
    """The README's text with the tables as they should be."""
    return BLOCK.sub(lambda found: found[1] + block() + found[3], text)


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
