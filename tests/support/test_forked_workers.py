"""A forked worker of ``LimitedProcess`` is as a fresh one: what it is given, its limits, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.sandbox.limited_process import LimitedProcess, ProcessEndedError, ProcessLimits
from tests import forked_workers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="processes are not forked beside a GPU")

WORKER = "tests.support.state_worker"
LIMITS = ProcessLimits(seconds=0.1, memory=300 << 20, nice=1)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedProcess]:
    monkeypatch.setattr(forked_workers, "_WORKERS", (WORKER,))
    with LimitedProcess(WORKER, LIMITS) as process:
        yield process


def fresh(question: str) -> Any:
    """The answer of a process that is not forked."""
    with pytest.MonkeyPatch.context() as monkeypatch, LimitedProcess(WORKER, LIMITS) as process:
        monkeypatch.setattr(forked_workers, "_WORKERS", ())
        return process.ask(question)


def lasting(state: dict[str, Any]) -> dict[str, Any]:
    """Without what pytest changes of it."""
    variables = {name: value for name, value in state["variables"].items() if not name.startswith("PYTEST_")}
    return state | {"variables": variables}


def test_it_is_given_what_a_fresh_one_is(forked: LimitedProcess) -> None:
    found = lasting(forked.ask("state"))
    assert WORKER in forked_workers._helpers
    assert found == lasting(fresh("state"))
    assert found["parent"] == os.getpid()
    assert found["slow"] == []  # a chat template's process starts before a model's first prompt


@pytest.mark.parametrize("question", ["exit", "raise", "hang", "fill"])
def test_it_ends_as_a_fresh_one_does(forked: LimitedProcess, question: str) -> None:
    with pytest.raises(ProcessEndedError) as error:
        forked.ask(question)
    with pytest.raises(ProcessEndedError) as known:
        fresh(question)
    assert (str(error.value), error.value.by_time) == (str(known.value), known.value.by_time)


def test_what_it_needs_from_its_start_is_from_its_start(
    forked: LimitedProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other paths of modules or variables of the interpreter: a fresh process has them."""
    words = [sys.executable, "-I", "-S", "-c", "print()", "no JSON"]  # some other program
    assert forked_workers.worker_of(words, os.environ) is None
    forked.ask("state")
    forked.close()
    monkeypatch.setattr("tests.forked.fork_worker", lambda *_: pytest.fail("it was forked"))
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path) in forked.ask("state")["path"]
    forked.close()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert forked.ask("state")["variables"]["MALLOC_ARENA_MAX"] == "1"
