"""The server's parts one by one: frames, the link of an engine, buffers, scores, the verb."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ingot import LLM, SamplingParams
from ingot.config.grammar_spec import Grammar
from ingot.config.server_config import ServeConfig
from ingot.errors import ConfigError, RequestError
from ingot.runtime.late_warm_up import LateWarmUp
from ingot.serve.api_errors import ApiError
from ingot.serve.engine_calls import engine_process
from ingot.serve.engine_calls import process_link as link_module
from ingot.serve.engine_calls.answering import Answering, Job
from ingot.serve.engine_calls.engine_process import EngineLoop
from ingot.serve.engine_calls.process_link import Link, LinkClosedError
from ingot.serve.engine_calls.process_protocol import (
    Abort,
    Add,
    Embed,
    Embedded,
    Failed,
    FrameError,
    FromEngine,
    Gauges,
    LoadEngine,
    Logprob,
    News,
    Ready,
    Scored,
    ScorePrompt,
    Splitter,
    StepNews,
    ToEngine,
    frame,
)
from ingot.serve.server import listening
from ingot.text.grammar.grammar_compiler import Grammars
from tests.e2e.terminal import ingot
from tests.serve.client import ROOT
from tests.unit.fake_executor import VOCAB, check_empty, fake_executor

PARAMS = SamplingParams(max_new_tokens=3)
NOWHERE = ("--host", "203.0.113.1")  # where nothing can listen: no server starts by mistake
TO_ENGINE = [
    LoadEngine("engine", threads=1, runtime={"token_budget": 5}, features=(7, (80, 3000))),
    Add("7", [1, 2], SamplingParams(stop=("a",), seed=1).to_json(), 3),
    ScorePrompt("8", [1, 2, 3], 5),
    Embed("9", [1, 2, 3], "last"),
    Abort("7"),
    Abort("7", 2),
]
LOGPROB = Logprob(5, -0.5, ((5, -0.5), (6, float("-inf"))))
FROM_ENGINE = [
    Ready(100, 4, 64),
    Failed("no room", "1", "2", "less", ("batch",), {"fixes": [{"field": "max_seq_len"}]}, ("a line",)),
    StepNews(
        [
            News("7", 1, (5, 6), "stop", 9, (LOGPROB,), stop_logprob=-0.5),
            News("8", 0, (), error="no", refused=True),
        ],
        [Scored("8", [LOGPROB])],
        Gauges(1, 2, 0.5),
    ),
    StepNews([], [], Gauges(), [Embedded("9", b"\0\x80\xff\n")]),
]


class TestFrames:
    @pytest.mark.parametrize("size", [1, 3, 1000])
    @pytest.mark.parametrize(("kind", "messages"), [(ToEngine, TO_ENGINE), (FromEngine, FROM_ENGINE)])
    def test_messages_arrive_however_they_are_cut(self, kind: Any, messages: list[Any], size: int) -> None:
        data = b"".join(map(frame, messages))
        splitter: Splitter[Any] = Splitter(kind)
        found = [m for i in range(0, len(data), size) for m in splitter.feed(data[i : i + size])]
        assert found == messages

    @pytest.mark.parametrize(
        "body",
        [
            pickle.dumps({"a": 1}),
            msgspec.msgpack.encode(["Exec", "import os"]),
            msgspec.msgpack.encode(["Add", "7", ["x"], {}]),
            msgspec.msgpack.encode({"type": "Abort"}),
            b"",
        ],
    )
    def test_nothing_else_is_a_message(self, body: bytes) -> None:
        with pytest.raises(FrameError):
            Splitter(ToEngine).feed(len(body).to_bytes(4, "big") + body)

    def test_an_engine_rejects_messages_of_engines(self) -> None:
        with pytest.raises(FrameError):
            Splitter(ToEngine).feed(frame(FROM_ENGINE[0]))

    def test_a_frame_is_bounded(self) -> None:
        with pytest.raises(FrameError, match="4294967295 bytes"):
            Splitter(ToEngine).feed(b"\xff\xff\xff\xff")


class TestLink:
    def test_a_server_that_does_not_read_does_not_block_the_engine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Up to a bound; then the engine waits until it is read from."""
        ours, theirs = socket.socketpair()
        engine = Link(theirs)
        monkeypatch.setattr(link_module, "MOST_UNSENT", 4 << 20)
        big = StepNews([News("7", 0, tuple(range(1000)))] * 300, [], Gauges())
        count = 3
        for _ in range(count):
            engine.send(big)
            assert engine.exchange(wait=False) == []
        while len(engine._unsent) <= 4 << 20:
            engine.send(big)
            count += 1
        waiting = threading.Thread(target=engine.exchange, kwargs={"wait": False})
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        splitter: Splitter[Any] = Splitter(FromEngine)
        found: list[Any] = []
        while waiting.is_alive():
            found += splitter.feed(ours.recv(1 << 20))
        threading.Thread(target=engine.flush).start()
        while len(found) < count:
            found += splitter.feed(ours.recv(1 << 20))
        assert found == [big] * count

    def test_a_closed_link_is_an_error(self) -> None:
        ours, theirs = socket.socketpair()
        ours.sendall(frame(Abort("7")))
        ours.close()
        engine = Link(theirs)
        with pytest.raises(LinkClosedError):
            engine.exchange(wait=True)


class TestEngineLoop:
    """The loop over an executor without a model."""

    def run(self, *messages: ToEngine, until: int) -> tuple[list[StepNews], Any]:
        """Steps until ``until`` news have come."""
        executor, _ = fake_executor()
        ours, theirs = socket.socketpair()
        loop = EngineLoop(executor, Link(theirs))
        ours.sendall(b"".join(map(frame, messages)))
        found: list[StepNews] = []

        def read() -> None:
            splitter: Splitter[Any] = Splitter(FromEngine)
            while sum(len(step.news) + len(step.scored) for step in found) < until:
                found.extend(splitter.feed(ours.recv(1 << 20)))
            ours.close()

        reading = threading.Thread(target=read)
        reading.start()
        with pytest.raises(LinkClosedError):
            loop.run()
        reading.join()
        return found, executor

    def test_steps_go_on_while_a_grammar_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The request after it is answered first; then the grammar's error arrives."""
        done, slow = threading.Event(), PARAMS.replace(grammar=Grammar.choice(["a"]))

        def prepare(self: Grammars, values: SamplingParams, *given: Any, tried: int | None = None) -> None:
            if values.grammar is None:
                return
            assert tried == 5
            assert done.wait(60)
            raise RequestError("the grammar is refused")

        monkeypatch.setattr(Grammars, "prepare", prepare)
        executor, _ = fake_executor()
        ours, theirs = socket.socketpair()
        messages = [
            Add("g", [1, 2], slow.to_json(), grammar_bytes=5),
            Add("gone", [1], slow.to_json(), grammar_bytes=5),
            Abort("gone"),
        ]
        ours.sendall(b"".join(map(frame, [*messages, Add("b", [3], PARAMS.to_json())])))
        ids: list[tuple[str, str | None]] = []
        waiting: list[int] = []

        def read() -> None:
            splitter: Splitter[Any] = Splitter(FromEngine)
            while not ids or ids[-1][0] != "g":
                for step in splitter.feed(ours.recv(1 << 20)):
                    ids.extend((news.id, news.error) for news in step.news)
                    waiting.append(step.gauges.waiting)
                if len(ids) == 3:
                    done.set()
            ours.close()

        reading = threading.Thread(target=read)
        reading.start()
        with pytest.raises(LinkClosedError):
            EngineLoop(executor, Link(theirs)).run()
        reading.join()
        assert ids == [("b", None)] * 3 + [("g", "the grammar is refused")]
        assert waiting == [1] * (len(waiting) - 1) + [0]  # who compiles waits
        check_empty(executor)

    def test_requests_share_frames(self) -> None:
        params = PARAMS.to_json()
        steps, executor = self.run(Add("a", [1, 2], params), Add("b", [3], params), until=6)
        assert [sorted(news.id for news in step.news) for step in steps] == [["a", "b"]] * 3
        assert [news.finish_reason for news in steps[-1].news] == ["length", "length"]
        assert steps[0].gauges.running == 2
        assert steps[-1].gauges == Gauges(prefix_queries=3)
        check_empty(executor)

    @pytest.mark.parametrize(("index", "left"), [(0, {1, 2}), (2, {0, 1}), (None, set())])
    def test_an_answer_ends_alone(self, index: int | None, left: set[int]) -> None:
        """Where a stop string ended it; the others of its request go on."""
        executor, _ = fake_executor()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop = EngineLoop(executor, Link(theirs))
            for message in (Add("a", [1, 2], PARAMS.replace(n=3).to_json()), Abort("a", index)):
                assert loop._obey(message) == []
        found: set[int] = set()
        while executor.has_work:
            found |= {update.index for update in executor.step()}
        assert found == left
        check_empty(executor)

    def test_a_request_that_cannot_be_served_ends_alone(self) -> None:
        params = PARAMS.to_json()
        steps, executor = self.run(
            Add("a", [1, 99], params), Add("b", [3], {**params, "top_p": 7}), ScorePrompt("c", [], 1),
            Embed("e", [3], "max"), Embed("f", [], "mean"), Add("d", [3], params), Abort("none"), until=8,
        )  # fmt: skip
        errors = {news.id: news.error for step in steps for news in step.news if news.error}
        assert set(errors) == {"a", "b", "c", "e", "f"}
        assert "unknown pooling" in str(errors["e"])
        assert "outside the vocabulary" in str(errors["a"])
        check_empty(executor)

    def test_an_abort_frees_the_place_before_the_next_step(self) -> None:
        long = SamplingParams(max_new_tokens=40).to_json()
        steps, executor = self.run(Add("a", [1], long), Add("b", [2], PARAMS.to_json()), Abort("a"), until=3)
        assert [news.id for step in steps for news in step.news] == ["b"] * 3
        check_empty(executor)

    def test_an_engine_whose_step_fails_reports_it_and_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        executor, runner = fake_executor()
        monkeypatch.setattr(engine_process, "_open", lambda load: (executor, LateWarmUp(runner, ())))
        monkeypatch.setattr(runner, "run", lambda step: 1 / 0)
        monkeypatch.setattr(engine_process.signal, "signal", lambda number, action: None)
        ours, theirs = socket.socketpair()
        splitter: Splitter[Any] = Splitter(FromEngine)
        found: list[Any] = []

        def ask() -> None:
            ours.sendall(frame(TO_ENGINE[0]))
            found.extend(splitter.feed(ours.recv(1 << 20)))
            ours.sendall(frame(Add("a", [1], PARAMS.to_json())))

        asking = threading.Thread(target=ask)
        asking.start()
        with pytest.raises(ZeroDivisionError):
            engine_process.main(theirs.detach())
        asking.join()
        found += splitter.feed(ours.recv(1 << 20))
        assert found[0] == Ready(VOCAB, executor.max_batch_size, executor.max_seq_len)
        assert found[1] == Failed("the engine failed: ZeroDivisionError: division by zero")

    def late(
        self, parts: int, messages: dict[int, list[ToEngine]], until: int
    ) -> tuple[list[tuple[str, bool]], Any]:
        """Runs with parts of a warm-up, the server's messages sent after so many of them, and closes the
        link after as many events as ``until``; (what, whether requests were in flight) in order.
        """
        executor, runner = fake_executor()
        runner.graphs = runner.prompts = SimpleNamespace()  # type: ignore[attr-defined]
        ours, theirs = socket.socketpair()
        events: list[tuple[str, bool]] = []

        def note(what: str) -> None:
            events.append((what, executor.has_work))
            for message in messages.pop(sum(one == "part" for one, _ in events), []):
                ours.sendall(frame(message))
            if len(events) == until:
                ours.close()

        step = executor.step

        def stepped() -> Any:
            note("step")
            return step()

        executor.step = stepped  # type: ignore[method-assign]
        for message in messages.pop(0, []):
            ours.sendall(frame(message))
        late = LateWarmUp(runner, [lambda: note("part")] * parts)
        with pytest.raises(LinkClosedError):
            EngineLoop(executor, Link(theirs), late=late).run()
        return events, late

    def test_a_warm_up_goes_on_while_nothing_is_in_flight(self) -> None:
        """A request waits for one part at most, and no part is done before its answer has ended."""
        params = PARAMS.to_json()
        events, late = self.late(4, {2: [Add("a", [1, 2], params)]}, until=7)
        names = [name for name, _ in events]
        assert names == ["part", "part", "step", "step", "step", "part", "part"]
        assert all(flying == (name == "step") for name, flying in events)
        assert late.left == 0

    def test_what_has_come_already_is_first(self) -> None:
        events, late = self.late(2, {0: [Add("a", [1, 2], PARAMS.to_json())]}, until=4)
        assert [name for name, _ in events] == ["step", "step", "step", "part"]
        assert late.left == 1, "a server that goes ends the process after the part"

    def test_a_warm_up_waits_for_a_grammar(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which is compiled in another thread, while this one sleeps."""
        executor, runner = fake_executor()
        runner.graphs = runner.prompts = SimpleNamespace()  # type: ignore[attr-defined]
        ours, theirs = socket.socketpair()
        done, waits, parts = threading.Event(), [], []

        def prepare(*unused: Any, **also: Any) -> None:
            assert done.wait(60)
            raise RequestError("the grammar is refused")

        monkeypatch.setattr(Grammars, "prepare", prepare)
        link = Link(theirs)
        exchange = link.exchange

        def exchanged(*, wait: bool) -> list[ToEngine]:
            waits.append(wait)
            assert len(waits) < 50, "it spins"
            return exchange(wait=wait)

        monkeypatch.setattr(link, "exchange", exchanged)
        slow = PARAMS.replace(grammar=Grammar.choice(["a"])).to_json()
        ours.sendall(frame(Add("g", [1, 2], slow, grammar_bytes=5)))
        threading.Timer(0.1, done.set).start()

        def part() -> None:
            parts.append(done.is_set())
            ours.close()

        with pytest.raises(LinkClosedError):
            EngineLoop(executor, link, late=LateWarmUp(runner, [part])).run()
        assert parts == [True]
        assert True in waits


def test_scores_do_not_depend_on_chunks(llm: LLM) -> None:
    from ingot.serve.engine_calls.prompt_scoring import keep_scores, scores

    ids = llm.prompt_ids("A fire broke out in a hotel. 55 people were brought to safety.")
    logits = llm.logits(ids)
    keep = keep_scores(ids, top=2)
    ((whole, _),) = scores(ids, keep(logits, 0))
    import torch

    ((chunked, _),) = scores(ids, torch.cat([keep(logits[:5], 0), keep(logits[5:6], 5), keep(logits[6:], 6)]))
    assert chunked == whole
    assert [one.logprob for one in whole] == pytest.approx(llm.log_likelihood(ids).tolist(), abs=1e-5)
    assert [one.token_id for one in whole] == ids[1:]
    best = logits.argmax(dim=1).tolist()
    assert [one.top[0][0] for one in whole] == best[:-1]


class TestAnswering:
    def answering(self, llm: LLM, **values: Any) -> Answering:
        job = Job([1, 2], SamplingParams(stop=("zzz",), **values))
        return Answering([job], llm.tokenizer, by_piece=True, most_unread=3)

    def read(self, found: Answering) -> list[tuple[int, str, str | None]]:
        async def main() -> list[tuple[int, str, str | None]]:
            return [(index, piece.text, piece.finish_reason) async for index, piece in found.pieces()]

        return asyncio.run(main())

    def test_pieces(self, llm: LLM) -> None:
        found = self.answering(llm, n=2)
        for index, token in ((0, 65), (1, 66), (0, 67)):
            assert not found.take(0, News("7", index, (token,)))
        found.take(0, News("7", 0, (), "stop", 5))
        found.take(0, News("7", 1, (68,), "length"))
        assert self.read(found) == [
            (0, "A", None), (1, "B", None), (0, "C", None), (0, "", "stop"), (1, "D", "length"),
        ]  # fmt: skip

    def test_a_stop_string_ends_the_answer_ahead_of_the_engine(self, llm: LLM) -> None:
        found = self.answering(llm)
        (z,) = llm.prompt_ids("z")
        assert [found.take(0, News("7", 0, (z,))) for _ in range(3)] == [False, False, True]
        assert not found.take(0, News("7", 0, (z,)))
        assert found.num_tokens == 3
        assert self.read(found)[-1] == (0, "", "stop")

    def test_the_buffer_is_bounded(self, llm: LLM) -> None:
        found = self.answering(llm, n=2)
        for _ in range(6):
            found.take(0, News("7", 0, (65,)))
        assert found.error is None
        found.take(0, News("7", 1, (65,)))
        assert found.error is not None
        with pytest.raises(ApiError, match="left 6 pieces"):
            self.read(found)

    def test_messages_before_an_error_are_delivered(self, llm: LLM) -> None:
        found = self.answering(llm)
        found.take(0, News("7", 0, (65,)))
        found.fail(ApiError(500, "dead"))
        texts = []

        async def main() -> None:
            async for _, piece in found.pieces():
                texts.append(piece.text)

        with pytest.raises(ApiError, match="dead"):
            asyncio.run(main())
        assert texts == ["A"]


class TestVerb:
    @pytest.mark.parametrize(
        ("words", "code", "text"),
        [
            (("{checkpoint}", *NOWHERE), 1, "is a checkpoint, of which no engine was built"),
            (("{unproven}", *NOWHERE), 1, "built without golden cases"),
            (("{engine}", "{engine}"), 2, "two engines have the same name"),
            (("{engine}", "--name", "a", "--name", "b"), 2, "one name for each engine"),
            (("{engine}", "--port", 70000), 2, "--port: "),
            (("{engine}", "--max-queue", -1), 2, "--max-queue: "),
            (("{engine}", "--api-key", " "), 2, "printable"),
            (("{engine}", "--max-seq-len", 10**6, "--port", 0), 2, "built for a smaller max_seq_len"),
            (("{engine}", "--kv-dtype", "int3"), 2, "unknown kv_dtype"),
            (("{engine}", "--cache-tokens", 64, "--port", 0), 1, "--max-seq-len 64"),
            (("{engine}", *NOWHERE), 2, "cannot listen on this address"),
            (("nowhere/at/all",), 2, "nowhere"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_what_is_refused(
        self, engine: Path, tmp_path: Path, words: tuple[Any, ...], code: int, text: str
    ) -> None:
        unproven = tmp_path / "unproven"
        if "{unproven}" in words:
            shutil.copytree(engine, unproven)
            (unproven / "proof.json").unlink()
        places = {"engine": engine, "checkpoint": ROOT / "models" / "pocket-chat", "unproven": unproven}
        result = ingot("serve", *(str(word).format(**places) for word in words))
        assert text in result.stderr
        assert result.exit_code == code
        assert "Traceback" not in result.stderr

    def test_a_port_that_is_taken(self) -> None:
        with listening(ServeConfig(port=0)) as first:
            first.listen()
            port = first.getsockname()[1]
            with pytest.raises(ConfigError, match="cannot listen"), listening(ServeConfig(port=port)):
                pass

    def test_no_other_verb_imports_the_server(self) -> None:
        code = (
            "import sys; import ingot, ingot.cli.main\n"
            "import json; print(json.dumps(sorted(set(sys.modules) & "
            "{'fastapi', 'uvicorn', 'msgspec', 'starlette', 'prometheus_client', 'ingot.serve'})))"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert json.loads(found.stdout) == []

    def test_limits_travel_as_json(self) -> None:
        config = ServeConfig(port=0, max_queue=3, drain_seconds=0.5)
        assert ServeConfig.from_json(config.to_json()) == config
        assert ServeConfig().host == "127.0.0.1"
        for values in ({"port": -1}, {"max_queue": -1}, {"max_unread": 0}, {"drain_seconds": float("nan")}):
            with pytest.raises(ConfigError):
                ServeConfig(**values)
