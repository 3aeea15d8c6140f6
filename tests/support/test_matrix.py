"""The README's support tables: every cell names a test that ``make test`` runs, or a file from a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from ingot.cli.main import app
from tests.support.matrix import BLOCK, README, ROOT, cells, markdown, rewritten, tables

ALL = [cell for table in tables() for cell in cells(table)]
TESTS = sorted({cell.test for cell in ALL if cell.test is not None})


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> set[str]:
    """Ids that ``make test`` selects: of this session, and collected of files that are not in it."""
    here = {item.nodeid for item in request.session.items if item.get_closest_marker("slow") is None}
    files = sorted({test.partition("::")[0] for test in TESTS if test not in here})
    if not files:
        return here
    words = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow")
    given: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    found = subprocess.run(
        [sys.executable, *words, *files], **given, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-2000:]
    return here | set(found.stdout.splitlines())


def test_every_cell_s_test_is_one_of_make_test(collected: set[str]) -> None:
    assert [test for test in TESTS if test not in collected] == []


def test_results_are_files_of_a_gpu() -> None:
    files = {cell.named for cell in ALL if cell.test is None}
    assert files
    for file in files:
        assert any("H100" in text or "H200" in text for text in _texts(json.loads((ROOT / file).read_text())))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(one)


def test_the_readme_has_the_tables() -> None:
    text = README.read_text(encoding="utf-8")
    assert BLOCK.search(text), "the README has no block <!-- support -->"
    assert rewritten(text) == text, "run `python -m tests.support.matrix`"


def test_every_verb_has_a_row() -> None:
    verbs = next(table for table in tables() if "by what a model takes" in table["title"])
    commands: Any = typer.main.get_command(app)
    assert set(verbs["rows"]) == set(commands.commands)


def test_models_by_precisions_are_whole() -> None:
    table = tables()[0]
    assert len(list(cells(table))) == len(table["rows"]) * len(table["columns"])


def test_how_cells_are_shown() -> None:
    table = {
        "title": "T",
        "corner": "c",
        "rows": {"a": "A", "b": "B"},
        "columns": {"x": "X", "y": "Y", "z": "Z"},
        "test": "t.py::t[{column}-{row}]",
        "cells": {"y": {"a": "no: t.py::u"}, "z": {"b": "docs/results/f.json"}},
    }
    assert [cell.named for cell in cells(table)] == [
        *("t.py::t[x-a]", "no: t.py::u"),
        *("t.py::t[x-b]", "docs/results/f.json"),
    ]
    assert markdown(table).splitlines()[2:] == [
        "| c | X | Y | Z |",
        "| --- | --- | --- | --- |",
        "| A | ✓ | no | |",
        "| B | ✓ | | GPU |",
    ]
    for wrong in ({"w": {"a": "t"}}, {"x": {"c": "t"}}):
        with pytest.raises(KeyError):
            list(cells(table | {"cells": wrong}))


def test_a_test_that_is_not_there_is_seen(collected: set[str]) -> None:
    assert TESTS[0] in collected
    assert TESTS[0].replace("::test_", "::test_no_") not in collected


def test_no_table_is_wider_than_a_screen() -> None:
    for table in tables():
        heads = [table["corner"], *table["columns"].values()]
        widest = max(map(len, table["rows"].values()), default=0)
        assert widest + sum(max(len(head), 3) + 3 for head in heads[1:]) <= 140
