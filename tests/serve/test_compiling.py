"""Where grammars are compiled: not in a step, and not in the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from typing import Any

import numpy as np
import pytest

from ingot import Grammar, SamplingParams
from ingot.engine.engine_facts import read_text_side
from ingot.errors import RequestError
from ingot.sandbox.limited_process import ProcessLimits
from ingot.serve import grammar_checks
from ingot.serve.api_errors import ApiError
from ingot.serve.engine_calls.grammar_compiling import Compiled, Compiling
from ingot.serve.engine_calls.process_link import Link
from ingot.serve.engine_calls.process_protocol import Abort, Add, frame
from ingot.text.grammar.grammar_check import TrialDiedError, new_probe, try_grammar
from ingot.text.grammar.grammar_compiler import GrammarMatcher, Grammars, mask_words
from tests.serve.client import PATIENCE, ROOT

POCKET = ROOT / "models" / "pocket-chat"
QUICK = "quick"


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
        assert ["index out of bounds" in str(one.result) for one in compiling.finished()] == [True] * 3

    def test_cancelled_requests_are_neither_compiled_nor_kept(self) -> None:
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
        params, matcher = found["a"].result  # type: ignore[misc]
        assert params == SamplingParams.from_json(good.params)
        assert matcher is not None
        assert isinstance(found["b"].result, RequestError)
        assert "the grammar is refused" in str(found["b"].result)


class TestGrammarChecks:
    def test_a_grammar_is_tried_once_and_many_wait_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[Grammar] = []

        def note(_: Any, grammar: Grammar, cancelled: Any) -> int:
            tried.append(grammar)
            return 7

        monkeypatch.setattr(grammar_checks, "try_grammar", note)

        async def main() -> None:
            checks = grammar_checks.GrammarChecks()
            asked = [checks.check(Grammar.regex("a"), "guided_regex") for _ in range(9)]
            assert await asyncio.gather(*asked) == [7] * 9
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

        def fail_once(*_: Any) -> int:
            if failures:
                raise failures.pop()
            return 0

        monkeypatch.setattr(grammar_checks, "try_grammar", fail_once)

        async def main() -> int:
            checks = grammar_checks.GrammarChecks()
            with pytest.raises(ApiError) as caught:
                await checks.check(Grammar.regex("a"), "guided_regex")
            await checks.check(Grammar.regex("a"), "guided_regex")
            checks.close()
            return caught.value.status

        assert asyncio.run(main()) == status

    def test_a_killed_process_differs_from_a_grammar_that_takes_too_long(self) -> None:
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

        def refuse(_: Any, grammar: Grammar, cancelled: Any) -> int:
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

    def test_what_was_asked_for_longest_ago_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[Grammar] = []

        def note(_: Any, grammar: Grammar, cancelled: Any) -> int:
            tried.append(grammar)
            return 7

        monkeypatch.setattr(grammar_checks, "try_grammar", note)
        monkeypatch.setattr(grammar_checks, "_MOST_KNOWN", 2)

        async def main() -> None:
            checks = grammar_checks.GrammarChecks()
            for pattern in "abacab":
                await checks.check(Grammar.regex(pattern), "guided_regex")
            checks.close()

        asyncio.run(main())
        assert tried == [Grammar.regex(pattern) for pattern in "abcb"]

    def test_too_many_and_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A check that waits too long is a 503 and its trial is ended; one more than may wait is a 429."""
        monkeypatch.setattr(grammar_checks, "try_grammar", slow_trial)
        monkeypatch.setattr(grammar_checks, "_SECONDS", 0.2)
        monkeypatch.setattr(grammar_checks, "_MOST_WAITING", 2)

        async def status(checks: grammar_checks.GrammarChecks, pattern: str) -> int:
            try:
                await checks.check(Grammar.regex(pattern), "guided_regex")
            except ApiError as error:
                waits.append(int(error.headers["Retry-After"]))
                return error.status
            return 200

        async def main() -> list[int]:
            checks = grammar_checks.GrammarChecks()
            found = list(await asyncio.gather(*(status(checks, one) for one in "abc")))
            found.append(await status(checks, QUICK))
            checks.close()
            return found

        waits: list[int] = []
        assert asyncio.run(main()) == [503, 503, 429, 200]
        assert waits == [1, 5, 3]  # the 429 at once; then two trials of 5 s in two processes, and one

    def test_cancelled_trials_are_not_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """150 slow grammars whose clients disconnect do not block others."""
        monkeypatch.setattr(grammar_checks, "try_grammar", slow_trial)
        monkeypatch.setattr(grammar_checks, "_MOST_WAITING", 1000)

        async def main() -> None:
            checks = grammar_checks.GrammarChecks()
            asked = [asyncio.ensure_future(checks.check(Grammar.regex("b" * i), None)) for i in range(1, 151)]
            await asyncio.sleep(0.1)
            for one in asked:
                one.cancel()
            async with asyncio.timeout(PATIENCE):
                assert await checks.check(Grammar.regex(QUICK), None) == 7
            assert len(checks._known) == 1
            checks.close()

        asyncio.run(main())

    def test_a_trial_continues_while_a_client_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        go_on = threading.Event()

        def trial(_: Any, grammar: Grammar, cancelled: threading.Event) -> int:
            go_on.wait(PATIENCE)
            return -1 if cancelled.is_set() else 7

        monkeypatch.setattr(grammar_checks, "try_grammar", trial)

        async def main() -> None:
            checks = grammar_checks.GrammarChecks()
            first, second = (asyncio.ensure_future(checks.check(Grammar.regex("a"), None)) for _ in range(2))
            await asyncio.sleep(0.05)
            first.cancel()
            await asyncio.sleep(0.05)
            go_on.set()
            assert await second == 7
            checks.close()

        asyncio.run(main())

    def test_a_running_trial_is_interrupted(self) -> None:
        """Whether its process runs or is being started; the next one is served."""
        slow = Grammar.regex("a*" * 9000 + "b")
        with new_probe(ProcessLimits(seconds=60)) as probe:
            assert try_grammar(probe, Grammar.regex("a")) < 4 << 20
            for started in (True, False):
                cancelled = threading.Event()
                failures: list[Exception] = []

                def ask(cancelled: threading.Event = cancelled, failures: list[Exception] = failures) -> None:
                    try:
                        try_grammar(probe, slow, cancelled)
                    except TrialDiedError as error:
                        failures.append(error)

                if not started:
                    cancelled.set()
                thread = threading.Thread(target=ask)
                thread.start()
                thread.join(0.3 if started else PATIENCE)
                cancelled.set()
                probe.interrupt()
                thread.join(PATIENCE)
                assert len(failures) == 1
            assert try_grammar(probe, Grammar.regex("a")) < 4 << 20


class TestBytes:
    """A compiled grammar is bounded by what it takes, not by its text."""

    @pytest.mark.usefixtures("fresh_workers")
    def test_a_trial_measures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        large = Grammar.regex("a*" * 2000 + "b")  # 4 KB of text
        with new_probe() as probe:
            small = try_grammar(probe, Grammar.regex("[a-z]{1,5}"))
            size = try_grammar(probe, large)
            assert small < 2 << 20 < 4 << 20 < size < 32 << 20
            assert abs(try_grammar(probe, large) - size) < 4 << 20  # what was freed is not counted
            monkeypatch.setattr("ingot.text.grammar.grammar_check.MOST_BYTES", 2 << 20)
            with pytest.raises(RequestError, match=r"compiled grammar is too large; seen: \d+ MiB"):
                try_grammar(probe, large)
            try_grammar(probe, Grammar.regex("[a-z]{1,5}"))

    def test_a_trial_has_the_memory_that_the_engine_would_need(self) -> None:
        with new_probe(ProcessLimits(seconds=60, memory=96 << 20)) as probe:
            with pytest.raises(RequestError, match="needs more than 96 MiB of memory"):
                try_grammar(probe, Grammar.regex("a*" * 9000 + "b"))
            assert try_grammar(probe, Grammar.regex("a")) < 4 << 20

    def test_an_engine_keeps_as_many_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ingot.text.grammar.grammar_compiler._KEPT_BYTES", 100 << 20)
        grammars = Grammars(read_text_side(POCKET)[1].tokenizer, 3008)
        sizes = {"a": 20, "b": 30, "c": 10, "d": 90, "e": 1}  # MiB, and each has 8 for its states
        kept = []
        for pattern, size in sizes.items():
            params = SamplingParams(grammar=Grammar.regex(pattern))
            grammars.prepare(params, frozenset({2800}), tried=size << 20)
            kept.append("".join(one.text for one in grammars._compiled))
        assert kept == ["a", "ab", "abc", "d", "e"]

    def test_a_grammar_whose_states_are_used_up_is_compiled_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All its answers share them: it would fail for good, as long as it is kept."""
        monkeypatch.setattr("ingot.text.grammar.vocabulary._LEXER_STATES", 300)
        grammars = Grammars(read_text_side(POCKET)[1].tokenizer, 3008)
        params = SamplingParams(grammar=Grammar.regex("(.*a.{60}b|.*b.{60}a)"))

        def prepared() -> GrammarMatcher:
            found = grammars.prepare(params, frozenset({2800}), tried=0)
            assert found is not None
            return found

        bits = np.zeros(mask_words(3008), np.int32)
        matcher, ids = prepared(), list[int]()

        def write() -> None:
            for step in range(300):
                matcher.mask_into(bits, ids)
                allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
                ids.append(int(allowed[step * 7919 % len(allowed)]))

        with pytest.raises(RequestError, match="too many states"):
            write()
        for _ in range(3):
            prepared().mask_into(bits, ())

    def test_the_grammars_of_all_requests_have_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar_checks, "_MOST_BYTES", 100 << 20)
        checks = grammar_checks.GrammarChecks()
        a, b, c = ({Grammar.regex(pattern): 40 << 20} for pattern in "abc")
        with checks.room(a), checks.room(b), checks.room(a):
            with pytest.raises(ApiError) as caught, checks.room(c):
                pass
            assert (caught.value.status, caught.value.code) == (503, "grammars_busy")
            assert caught.value.headers["Retry-After"]
            with checks.room({}), checks.room(b):  # nothing more
                pass
        assert (checks._used, dict(checks._users)) == (0, {})
        with checks.room(c), checks.room({Grammar.regex("d"): 1 << 20}):
            pass
        with checks.room({Grammar.regex("larger than the bound"): 200 << 20}):  # alone
            pass
        assert (checks._used, dict(checks._users)) == (0, {})
        checks.close()


def slow_trial(_: Any, grammar: Grammar, cancelled: threading.Event) -> int:
    """Goes on until it is cancelled; ``QUICK`` does not."""
    if grammar == Grammar.regex(QUICK):
        return 7
    cancelled.wait(PATIENCE)
    raise TrialDiedError("the grammar crashes (SIGKILL)")
