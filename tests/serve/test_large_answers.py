"""Large answers are built in parts, so that no stream waits for them."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.llm.outputs import TokenLogprobs
from ingot.serve import json_parts
from ingot.serve.api.logprob_text import LogprobLists
from ingot.serve.api_errors import ApiError
from ingot.serve.engine_calls import answering
from ingot.serve.engine_calls import prompt_scoring as scoring
from ingot.serve.engine_calls.answering import Answering, Job
from ingot.serve.engine_calls.engine_process import EngineLoop
from ingot.serve.engine_calls.process_link import Link
from ingot.serve.engine_calls.process_protocol import Abort, Logprob, News, ScorePrompt, frame
from ingot.serve.engine_calls.prompt_scoring import scores
from ingot.serve.http.http_bodies import InParts, full_answer
from ingot.serve.json_parts import LazyList, in_parts
from tests.serve.client import Server
from tests.serve.conftest import chat, completion
from tests.unit.fake_executor import check_empty, fake_executor

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LOGPROB = Logprob(5, -0.5, ((5, -0.5), (6, -1.5)))


async def parts_of(value: Any, *around: bytes) -> list[bytes]:
    return [data async for data in in_parts(value, *around)]


class TestInParts:
    @pytest.mark.parametrize("seconds", [0.0, 1.0])
    @pytest.mark.parametrize("size", [1, 50, 1 << 20])
    def test_the_bytes_are_those_of_the_lists(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float, size: int
    ) -> None:
        monkeypatch.setattr(json_parts, "PART_SECONDS", seconds)
        monkeypatch.setattr(json_parts, "PART_BYTES", size)

        def nested(make: Any) -> dict[str, Any]:
            empty: list[int] = []
            inner = {"of": make(lambda: range(40), True), "none": make(lambda: empty, True), 'a"b': "é\n"}
            return {
                "plain": [1, {"x": None}],
                "rows": make(lambda: [inner, {"y": 1}, {"deep": {"er": inner}}], False),
                "no rows": make(lambda: empty, False),
                "end": {"z": True},
            }

        value = nested(lambda make, flat: LazyList(make, flat=flat))
        expected = nested(lambda make, flat: list(make()))
        found = asyncio.run(parts_of(value, b"data: ", b"\n\n"))
        text = b"".join(found)
        assert text.startswith(b"data: {")
        assert text.endswith(b"}\n\n")
        assert json.loads(text.removeprefix(b"data: ")) == expected
        assert (len(found) == 1) == (seconds == 1.0 and size == 1 << 20)
        assert all(len(part) < size + 200 for part in found)

    def test_others_have_their_turn_between_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also beside several large answers at once, which share the time."""
        monkeypatch.setattr(json_parts, "PART_BYTES", 100)
        turns, seen = [0], list[tuple[int, int]]()

        async def other() -> None:
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        async def answer(name: int) -> None:
            async for _ in in_parts({"rows": LazyList(lambda: range(1000))}):
                seen.append((name, turns[0]))

        async def main() -> None:
            task = asyncio.ensure_future(other())
            await asyncio.gather(*(answer(name) for name in range(3)))
            task.cancel()

        asyncio.run(main())
        for name in range(3):
            mine = [turn for whose, turn in seen if whose == name]
            assert len(mine) > 20
            assert all(later > earlier for earlier, later in itertools.pairwise(mine))
        assert json_parts._Count.now == 0

    def test_the_time_of_a_part_is_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [0.0]
        monkeypatch.setattr(json_parts.time, "perf_counter", lambda: clock[0])

        def rows() -> Any:
            for number in range(64):
                clock[0] += json_parts.PART_SECONDS / 32
                yield number

        async def main() -> int:
            first = in_parts({"rows": LazyList(lambda: range(10**6))})
            await anext(first)
            count = len(await parts_of({"rows": LazyList(rows)}))
            await first.aclose()
            return count

        together = asyncio.run(main())
        assert together > len(asyncio.run(parts_of({"rows": LazyList(rows)}))) >= 2
        assert json_parts._Count.now == 0


class TestWholeAnswers:
    def test_small_answers_have_a_length_and_large_answers_come_in_parts(self) -> None:
        async def work(count: int) -> dict[str, Any]:
            return {"rows": LazyList(lambda: range(count))}

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def main() -> None:
            request: Any = SimpleNamespace(receive=receive)
            small = await full_answer(request, work(3))
            assert (small.body, small.headers["content-length"]) == (b'{"rows":[0,1,2]}', "16")
            large = await full_answer(request, work(100_000))
            assert isinstance(large, InParts)
            assert "content-length" not in large.headers
            assert large.headers["content-type"] == "application/json"
            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            await large({"type": "http"}, receive, send)
            assert json.loads(b"".join(one.get("body", b"") for one in sent)) == {"rows": [*range(100_000)]}
            assert len(sent) > 5
            assert [one["more_body"] for one in sent[1:]] == [True] * (len(sent) - 2) + [False]

        asyncio.run(main())

    def test_the_source_may_pause_and_the_client_may_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ingot.serve.http.http_bodies.BODY_SECONDS", 0.1)

        async def rest() -> AsyncGenerator[bytes, None]:
            for part in (b"b", b"c"):
                await asyncio.sleep(0.3)  # a slow model, or a full queue
                yield part

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def reported(reads: int) -> bytes:
            """What a client gets that reads ``count`` pieces."""
            taken: list[bytes] = []

            async def send(message: Any) -> None:
                if len(taken) > reads:
                    await asyncio.Event().wait()
                taken.append(message.get("body", b""))

            await InParts(b"a", rest())({"type": "http"}, receive, send)
            return b"".join(taken)

        async def main() -> list[bytes]:
            return await asyncio.wait_for(asyncio.gather(reported(9), reported(1)), 30)

        assert asyncio.run(main()) == [b"abc", b"a"]

    def test_log_probabilities_over_http(self, server: Server) -> None:
        """Several parts, each answer as a small one has it."""
        values = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0}
        body = chat(**values, logprobs=True, top_logprobs=20)
        reply = server.post(CHAT, body | {"n": 4})
        assert reply.headers["transfer-encoding"] == "chunked"
        alone = server.post(CHAT, body).json["choices"][0]
        for index, choice in enumerate(reply.json["choices"]):
            assert choice["index"] == index
            tokens, expected = choice["logprobs"]["content"], alone["logprobs"]["content"]
            assert [one["token"] for one in tokens] == [one["token"] for one in expected]
            assert {len(one["top_logprobs"]) for one in tokens} == {20}

    def test_an_echo_over_http(self, server: Server) -> None:
        """Offsets and lists go through prompt and answer, for each prompt and each of its answers."""
        prompts = ["A fire broke out in a hotel. " * 12, "你好, the fire"]
        body = completion(prompts, max_tokens=5, ignore_eos=True, echo=True, logprobs=5, n=2, temperature=0.0)
        whole = server.post(COMPLETIONS, body).json["choices"]
        events = server.events(COMPLETIONS, body)
        for index, choice in enumerate(whole):
            lists = choice["logprobs"]
            assert choice["text"].startswith(prompts[index // 2])
            assert "".join(lists["tokens"]) == choice["text"] or index // 2  # a character of several tokens
            assert lists["text_offset"][0] == 0
            assert lists["text_offset"] == sorted(lists["text_offset"])
            assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
            assert len({len(values) for values in lists.values()}) == 1
            mine = [one for event in events for one in event["choices"] if one["index"] == index]
            assert "".join(one["text"] for one in mine) == choice["text"]
            for name in ("tokens", "text_offset"):
                assert [item for one in mine for item in one["logprobs"][name]] == lists[name]


class TestBounds:
    def answering(self, *, by_piece: bool, n: int = 1) -> Answering:
        job = Job([1], SamplingParams(max_new_tokens=50, logprobs=1, n=n))
        return Answering([job], None, by_piece=by_piece, most_unread=1000)

    def test_all_log_probabilities_of_an_answer_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By all its log-probabilities, those of every choice together."""
        monkeypatch.setattr(answering, "MOST_LOGPROBS", 12)
        found = self.answering(by_piece=False, n=2)
        for count in range(4):
            found.take(0, News("7", count % 2, (5,), logprobs=(LOGPROB,)))
            assert found.error is None
        found.take(0, News("7", 0, (5,), logprobs=(LOGPROB,)))
        assert found.error is not None
        assert (found.error.status, found.error.code) == (400, "answer_too_large")
        assert "more than 12 log-probabilities" in found.error.message

    def test_a_stream_keeps_no_log_probabilities(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answering, "MOST_LOGPROBS", 12)
        found = self.answering(by_piece=True)
        for _ in range(20):
            found.take(0, News("7", 0, (5,), logprobs=(LOGPROB,)))
        assert found.error is None
        assert found.answers(0)[0].logprobs == []
        assert [len(piece.logprobs) for _, piece in found._unread] == [1] * 20

    def test_an_echo_is_bounded_before_any_work(self, server: Server) -> None:
        body = completion([[65] * 500] * 2, max_tokens=0, echo=True, logprobs=20, n=100)
        reply = server.post(COMPLETIONS, body)
        assert (reply.status, reply.error["code"]) == (400, "answer_too_large")


class TestScores:
    """Those of a prompt come in parts, between which the others step."""

    def test_parts_join_to_all_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = torch.arange(7 * 5, dtype=torch.float64).view(7, 5)
        ((whole, last),) = scores(range(8), kept)
        assert last
        for values, count in ((3, 7), (6, 4), (20, 2), (21, 1)):
            monkeypatch.setattr(scoring, "PART_VALUES", values)
            parts = list(scores(range(8), kept))
            assert len(parts) == count
            assert [one for part, _ in parts for one in part] == whole
            assert [last for _, last in parts] == [False] * (count - 1) + [True]

    def test_one_token_has_one_part(self) -> None:
        assert list(scores([5], torch.empty(0, 3, dtype=torch.float64))) == [([], True)]

    def loop(self, *messages: Any) -> tuple[EngineLoop, Any, socket.socket]:
        executor, _ = fake_executor()
        ours, theirs = socket.socketpair()
        ours.sendall(b"".join(map(frame, messages)))
        return EngineLoop(executor, Link(theirs)), executor, ours

    def test_prompts_take_turns_and_an_abort_ends_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scoring, "PART_VALUES", 2)
        loop, executor, _ours = self.loop()
        for name in ("a", "b", "gone"):
            loop._obey(ScorePrompt(name, [1, 2, 3, 4, 5, 6], 1))
        reading, sent = True, []
        while reading or loop._scores:
            for update in executor.step() if executor.has_work else []:
                assert loop._read(update.request_id) is None
            reading = executor.has_work
            if not reading and "gone" in loop._scores and sent.count("gone") == 1:
                loop._obey(Abort("gone"))
            sent += [f"{one.id}{'.' * one.last}" for one in loop._next_scores()]
        assert sent.count("gone") <= 1
        assert [one for one in sent if one != "gone"] == ["a", "b"] * 4 + ["a.", "b."]
        assert loop._next_scores() == []
        assert loop._scores == loop._reading == {}
        check_empty(executor)

    def test_an_aborted_prompt_leaves_nothing(self) -> None:
        loop, executor, _ours = self.loop()
        loop._obey(ScorePrompt("a", [1, 2, 3], 1))
        assert set(loop._reading) == {"a"}
        loop._obey(Abort("a"))
        assert loop._reading == {}
        check_empty(executor)

    def test_scored_waits_for_all_parts_of_all_prompts(self) -> None:
        """``scored`` waits for the last part, and for those of every prompt; an error ends the wait."""
        found = Answering([Job([1, 2], None, score=1)] * 2, None, by_piece=True, most_unread=9)

        async def main() -> None:
            waiting = asyncio.ensure_future(found.scored())
            for position, last in ((0, False), (1, True), (0, True)):
                await asyncio.sleep(0)
                assert not waiting.done()
                found.take_scores(position, [LOGPROB], last=last)
            await waiting
            failing = Answering([Job([1, 2], None, score=1)], None, by_piece=True, most_unread=9)
            waiting = asyncio.ensure_future(failing.scored())
            await asyncio.sleep(0)
            failing.fail(ApiError(500, "dead"))
            with pytest.raises(ApiError, match="dead"):
                async with asyncio.timeout(5):
                    await waiting

        asyncio.run(main())
        assert [len(found.scores[position]) for position in (0, 1)] == [2, 1]
        assert found.done


def test_offsets_go_on_from_part_to_part() -> None:
    tokenizer: Any = SimpleNamespace(token_text=lambda i: "ab你"[i], token_bytes=lambda i: "ab你"[i].encode())
    lists = LogprobLists(tokenizer, 0, [TokenLogprobs(1, -1.0, ())])
    first = {
        name: list(rows) for name, rows in lists.of([TokenLogprobs(2, float("-inf"), ((1, -2.0),))]).items()
    }
    assert first["tokens"] == ["a", "b", "你"]
    assert first["token_logprobs"] == [None, -1.0, -9999.0]
    assert first["top_logprobs"] == [None, {"b": -1.0}, {"b": -2.0, "你": -9999.0}]
    assert first["text_offset"] == [0, 1, 2]
    second = {name: list(rows) for name, rows in lists.of([TokenLogprobs(0, -3.0, ())]).items()}
    assert (second["tokens"], second["token_logprobs"], second["text_offset"]) == (["a"], [-3.0], [3])
