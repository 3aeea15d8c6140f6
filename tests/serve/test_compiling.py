"""Where grammars are compiled: not in a step, and not in the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from typing import Any

import pytest

from ingot import Grammar, SamplingParams
from ingot.engine.describe import read_text_side
from ingot.errors import RequestError
from ingot.processors.limited_process import ProcessLimits
from ingot.serve import grammar_checks
from ingot.serve.compiling import Compiled, Compiling
from ingot.serve.errors import ApiError
from ingot.serve.link import Link
from ingot.serve.protocol import Abort, Add, frame
from ingot.structured.grammar_check import TrialDiedError, new_probe, try_grammar
from ingot.structured.grammars import Grammars
from tests.serve.client import PATIENCE, ROOT

POCKET = ROOT / "models" / "pocket-chat"


class TestCompiling:
    """A request with a grammar joins the engine's steps once a thread has compiled it."""

    def add(self, name: str, schema: dict[str, Any]) -> Add:
        params = SamplingParams(max_new_tokens=3, grammar=Grammar.json_schema(schema))
        return Add(name, [1], params.to_json())

    def test_a_wait_ends_when_another_thread_wakes_it(self) -> None:
        ours, theirs = socket.socketpair()
        link = Link(theirs)
        link.wake()
        link.wake()
        assert link.exchange(wait=True) == []
        threading.Timer(0.05, link.wake).start()
        assert link.exchange(wait=True) == []
        ours.sendall(frame(Abort("7")))
        assert link.exchange(wait=True) == [Abort("7")]

    def test_a_panic_of_the_library_ends_one_request_and_no_thread(self) -> None:
        class PanicError(BaseException):  # as those of Rust are
            pass

        class Panicking(Grammars):
            def prepare(self, *given: Any, **more: Any) -> Any:
                raise PanicError("index out of bounds")

        woken = threading.Semaphore(0)
        compiling = Compiling(Panicking(None, 8), frozenset(), wake=woken.release)
        for name in "abc":  # more than there are threads
            compiling.start(self.add(name, {"type": "integer"}))
        for _ in "abc":
            assert woken.acquire(timeout=PATIENCE)
        assert ["index out of bounds" in str(one.error) for one in compiling.finished()] == [True] * 3

    def test_nobody_compiles_or_keeps_what_nobody_waits_for(self) -> None:
        """The queue holds requests that have a place in the engine's, and no others."""
        go_on, begun, woken = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
        prepared: list[SamplingParams] = []

        class Slow(Grammars):
            def prepare(self, params: SamplingParams, *given: Any, **more: Any) -> Any:
                prepared.append(params)
                begun.release()
                go_on.wait(PATIENCE)

        compiling = Compiling(Slow(None, 8), frozenset(), wake=woken.release)
        busy = [self.add(f"busy {i}", {"type": "null"}) for i in range(2)]
        for one in busy:  # all threads
            compiling.start(one)
            assert begun.acquire(timeout=PATIENCE)
        for i in range(100):
            compiling.start(self.add(str(i), {"type": "boolean"}))
            compiling.forget(str(i))
        compiling.start(self.add("last", {"type": "integer"}))
        assert list(compiling._asked) == ["last"]
        for one in busy:
            compiling.forget(one.id)
        go_on.set()
        while len(compiling):
            assert woken.acquire(timeout=PATIENCE)
            assert {one.add.id for one in compiling.finished()} <= {"last"}
        assert len(prepared) == 3

    def test_compiled_refused_and_forgotten(self) -> None:
        woken = threading.Semaphore(0)
        grammars = Grammars(read_text_side(POCKET)[1].tokenizer, 3008)
        compiling = Compiling(grammars, frozenset({2800}), wake=woken.release)
        good, bad = self.add("a", {"type": "integer"}), self.add("b", {"not": {}})
        for one in (good, bad, self.add("c", {"type": "null"})):
            compiling.start(one)
        compiling.forget("c")
        assert len(compiling) == 2
        found: dict[str, Compiled] = {}
        while len(compiling):
            assert woken.acquire(timeout=PATIENCE)
            found |= {one.add.id: one for one in compiling.finished()}
        assert set(found) == {"a", "b"}
        assert len(compiling) == 0
        assert found["a"].params == SamplingParams.from_json(good.params)
        assert "the grammar is refused" in str(found["b"].error)
        assert found["a"].matcher is not None
        assert found["b"].matcher is None


class TestGrammarChecks:
    def test_a_grammar_is_tried_once_and_many_wait_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[Grammar] = []
        monkeypatch.setattr(grammar_checks, "try_grammar", lambda _, grammar: tried.append(grammar))

        async def main() -> None:
            checks = grammar_checks.GrammarChecks()
            await asyncio.gather(*(checks.check(Grammar.regex("a"), "guided_regex") for _ in range(9)))
            checks.close()

        asyncio.run(main())
        assert tried == [Grammar.regex("a")]

    @pytest.mark.parametrize(
        ("failure", "status"),
        [
            (OSError(24, "Too many open files"), 503),
            (MemoryError(), 503),
            (TrialDiedError("the grammar crashes (SIGKILL)"), 400),
        ],
    )
    def test_a_trial_that_the_machine_failed_is_made_again(
        self, monkeypatch: pytest.MonkeyPatch, failure: Exception, status: int
    ) -> None:
        failures = [failure]

        def fail_once(*_: Any) -> None:
            if failures:
                raise failures.pop()

        monkeypatch.setattr(grammar_checks, "try_grammar", fail_once)

        async def main() -> int:
            checks = grammar_checks.GrammarChecks()
            with pytest.raises(ApiError) as caught:
                await checks.check(Grammar.regex("a"), "guided_regex")
            await checks.check(Grammar.regex("a"), "guided_regex")
            checks.close()
            return caught.value.status

        assert asyncio.run(main()) == status

    def test_a_process_that_is_killed_is_told_from_a_grammar_that_takes_too_long(self) -> None:
        with new_probe() as probe:
            try_grammar(probe, Grammar.regex("a"))
            assert probe._running is not None
            os.kill(probe._running.process.pid, signal.SIGKILL)
            with pytest.raises(TrialDiedError, match="SIGKILL"):
                try_grammar(probe, Grammar.regex("a"))
        hard = Grammar.choice([f"x{i}" for i in range(24_000)])
        with new_probe(ProcessLimits(seconds=0.02)) as probe, pytest.raises(RequestError) as caught:
            try_grammar(probe, hard)
        assert not isinstance(caught.value, TrialDiedError), caught.value

    def test_a_refusal_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[Grammar] = []

        def refuse(_: Any, grammar: Grammar) -> None:
            tried.append(grammar)
            raise RequestError("the grammar is refused")

        monkeypatch.setattr(grammar_checks, "try_grammar", refuse)

        async def main() -> None:
            checks = grammar_checks.GrammarChecks()
            for _ in range(2):
                with pytest.raises(ApiError, match="refused"):
                    await checks.check(Grammar.regex("a"), "guided_regex")
            checks.close()

        asyncio.run(main())
        assert len(tried) == 1

    def test_too_many_and_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A check that waits too long is a 503, one more than may wait a 429; what was tried is known."""
        go_on = threading.Event()
        monkeypatch.setattr(grammar_checks, "try_grammar", lambda *_: go_on.wait(PATIENCE))
        monkeypatch.setattr(grammar_checks, "_SECONDS", 0.2)
        monkeypatch.setattr(grammar_checks, "_MOST_WAITING", 2)

        async def status(checks: grammar_checks.GrammarChecks, pattern: str) -> int:
            try:
                await checks.check(Grammar.regex(pattern), "guided_regex")
            except ApiError as error:
                return error.status
            return 200

        async def main() -> list[int]:
            checks = grammar_checks.GrammarChecks()
            found = list(await asyncio.gather(*(status(checks, one) for one in "abc")))
            go_on.set()
            while len(found) < 4 or found[-1] == 429:
                found[3:] = [await status(checks, "c")]
            checks.close()
            return found

        assert asyncio.run(main()) == [503, 503, 429, 200]
