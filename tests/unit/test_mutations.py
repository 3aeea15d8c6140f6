"""Planted bugs still find their text, and the tests that should catch them are still there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.mutations.run import ROOT, applies, read_all


def test_each_finds_its_text_once() -> None:
    assert [f"{m.source}: {m.name}" for m in read_all() if not applies(m, ROOT)] == []


def test_each_changes_something() -> None:
    assert [m.name for m in read_all() if m.becomes == m.text] == []


def test_names_are_unique() -> None:
    names = [f"{m.source}: {m.name}" for m in read_all()]
    assert len(names) == len(set(names))


def test_the_tests_they_name_exist() -> None:
    missing = [f"{m.source}: {m.name}: {test}" for m in read_all() for test in m.tests if not exists(test)]
    assert missing == []


def exists(test: str) -> bool:
    """Whether a test id's file, class and function are there; parameters are pytest's to know."""
    file, *names = test.partition("[")[0].split("::")
    return (ROOT / file).exists() and "::".join(names) in {"", *defined(ROOT / file)}


@cache
def defined(path: Path) -> frozenset[str]:
    """``function``, ``Class`` and ``Class::function`` of a module."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            functions = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {node.name, *(f"{node.name}::{name}" for name in functions)}
    return frozenset(found)
