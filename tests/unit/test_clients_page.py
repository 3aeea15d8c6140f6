"""docs/clients.md: every cell names a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "clients.md"


def cells() -> list[str]:
    """What the links of the page's tables name: FILE::TEST."""
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE.read_text(encoding="utf-8"))


def names_of(file: Path) -> set[str]:
    """Functions and classes of a file whose names are tests', without importing it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            found.add(node.name)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found.add(node.name)
    return found


def test_every_named_test_exists() -> None:
    names = cells()
    assert len(names) > 10
    missing = [
        name
        for name in names
        if not (ROOT / name.partition("::")[0]).is_file()
        or name.partition("::")[2] not in names_of(ROOT / name.partition("::")[0])
    ]
    assert missing == []


def test_every_mark_has_a_test() -> None:
    """A cell is a dash or numbers; every number is defined below by a test, and every definition is used."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    marks = [cell.strip() for row in rows[1:] for cell in row.strip("| ").split("|")[1:]]
    odd = [mark for mark in marks if not re.fullmatch(r"–|(t\d+)( t\d+)*", mark)]
    assert odd == []
    used = {number for mark in marks for number in re.findall(r"t\d+", mark)}
    defined = set(re.findall(r"^- (t\d+): `tests/", text, re.M))
    assert used == defined
