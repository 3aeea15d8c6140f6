"""Planted bugs still find their text, and the tests that should catch them are still there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.mutations.run import ROOT, applies, read_all


def test_each_finds_its_text_once() -> None:
    assert [f"{m.source}: {m.name}" for m in read_all() if not applies(m, ROOT)] == []


def test_each_changes_something() -> None:
    assert [m.name for m in read_all() if m.becomes == m.text] == []


def test_names_are_unique() -> None:
    names = [f"{m.source}: {m.name}" for m in read_all()]
    assert len(names) == len(set(names))


def test_the_tests_they_name_run_in_make_test() -> None:
    missing = [f"{m.source}: {m.name}: {test}" for m in read_all() for test in m.tests if not runs(test)]
    assert missing == []


def runs(test: str) -> bool:
    """Whether a test id's file, class and function are there and not slow, and its case not left out by
    ``stays``; other parameters are pytest's to know.
    """
    test, _, case = test.partition("[")
    file, *names = test.split("::")
    if not names or not (ROOT / file).exists():
        return (ROOT / file).exists()
    stays = defined(ROOT / file).get("::".join(names))
    return stays is not None and (not case or not stays or case.removesuffix("]") in stays)


@cache
def defined(path: Path) -> dict[str, frozenset[str]]:
    """``function``, ``Class`` and ``Class::function`` of a module that are not slow, and the cases that a
    function's ``stays`` names; none: all.
    """
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = frozenset[str]()
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for each in inner:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = {ast.unparse(mark): mark for mark in each.decorator_list}
                if "pytest.mark.slow" in marks:
                    continue
                stays = [mark for text, mark in marks.items() if text.startswith("pytest.mark.stays(")]
                if any(
                    isinstance(part, ast.Call) and part is not mark
                    for mark in stays
                    for part in ast.walk(mark)
                ):
                    stays = []  # cases that the file computes
                name = f"{node.name}::{each.name}" if isinstance(node, ast.ClassDef) else each.name
                found[name] = frozenset(
                    each.value
                    for mark in stays
                    for each in ast.walk(mark)
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )
    return found


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/unit/test_mutations.py", True),
        ("tests/unit/test_nothing.py", False),
        ("tests/unit/test_mutations.py::test_names_are_unique", True),
        ("tests/unit/test_mutations.py::test_nothing", False),
        ("tests/e2e/test_faults.py::test_all_layers_of_rptq_are_proven", False),
        ("tests/parity/test_huggingface.py::test_logits_and_greedy_ids[gemma2]", True),
        ("tests/parity/test_huggingface.py::test_logits_and_greedy_ids[llama-linear]", False),
    ],
)
def test_what_make_test_runs(test: str, expected: bool) -> None:
    assert runs(test) is expected
