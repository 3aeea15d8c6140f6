"""Shapes of streamed answers, without a server: fields that are sent once, and where."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.llm.outputs import Answer, Piece
from ingot.runtime.selection import TokenLogprobs
from ingot.sandbox.limited_process import ProcessEndedError
from ingot.serve.api import completions
from ingot.serve.api.answer_parts import AnswerParts
from ingot.serve.api.chat_completions import ChatCall
from ingot.serve.api.completions import CompletionCall
from ingot.serve.api.responses import ResponseCall
from ingot.serve.api_errors import ApiError
from ingot.serve.request_schemas import ResponsesRequest
from ingot.serve.response_formats import MAX_SCHEMA_BYTES, check_size
from ingot.serve.served_model import ServedModel
from ingot.serve.speech_service import SpeechService

TEXT = 'OK.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


class Found:
    """Pieces of answers by choice, and the jobs that they answer."""

    def __init__(self, pieces: Sequence[tuple[int, Piece]], jobs: Sequence[Any] = ()) -> None:
        self._pieces, self.jobs = pieces, jobs

    async def scored(self) -> None:
        return

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        for one in self._pieces:
            yield one

    def answers(self, position: int) -> list[Answer]:
        return []  # the prompts are only read


async def test_log_probabilities_of_a_piece_with_several_parts_are_sent_once() -> None:
    call = ChatCall.__new__(ChatCall)
    call.params = SamplingParams(logprobs=0)
    call.new_parts = lambda: AnswerParts(thoughts="no", calls=True, most_calls=None)  # type: ignore[method-assign]
    tokens: list[int] = []
    call._logprobs = lambda given: {"content": [tokens.append(one.token_id) for one in given]}  # type: ignore
    piece = Piece(TEXT, (1, 2), 0, "stop", (TokenLogprobs(1, -1.0, ()), TokenLogprobs(2, -1.0, ())))
    found: Any = Found([(0, piece)])
    chunks = [chunk async for chunk in call.parts(found)]
    assert len(chunks) > 2
    assert tokens == [1, 2]
    assert [chunk["finish_reason"] for chunk in chunks][-1] == "tool_calls"
    assert {chunk["finish_reason"] for chunk in chunks[:-1]} == {None}


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_each_of_several_answers_is_echoed_after_its_own_prompt(n: int) -> None:
    call = CompletionCall.__new__(CompletionCall)
    call._prompts, call._n, call._echo, call._logprobs = ["A", "B"], n, True, None
    call._params, call.model = SamplingParams(), SimpleNamespace(tokenizer=None)  # type: ignore[assignment]
    pieces = [(index, Piece(f"{index}", (1,))) for index in (*range(2 * n), *range(2 * n))]
    found: Any = Found(pieces, [SimpleNamespace(ids=[1])] * 2)
    texts: dict[int, str] = {}
    async for chunk in call.parts(found):
        texts[chunk["index"]] = texts.get(chunk["index"], "") + chunk["text"]
    assert texts == {index: f"{'AB'[index // n]}{index}{index}" for index in range(2 * n)}


@pytest.mark.parametrize("n", [1, 2])
async def test_a_prompt_that_is_only_read_ends_by_its_length(n: int) -> None:
    call = CompletionCall.__new__(CompletionCall)
    call._prompts, call._n, call._echo, call._logprobs = ["A", "B"], n, True, None
    call._params, call.model = None, SimpleNamespace(tokenizer=None)  # type: ignore[assignment]
    found: Any = Found([], [SimpleNamespace(ids=[1])] * 2)
    reported = [(one["index"], one["text"], one["finish_reason"]) async for one in call.parts(found)]
    assert reported == [(index, "AB"[index // n], "length") for index in range(2 * n)]


def test_the_size_of_a_form_is_counted_in_bytes() -> None:
    fits = "é" * (MAX_SCHEMA_BYTES // 2)
    check_size(fits, "guided_regex")
    check_size([fits[:-3]], "guided_choice")
    for value in (fits + "a", [fits]):
        with pytest.raises(ApiError, match="bytes; at most"):
            check_size(value, "guided_regex")


@pytest.mark.parametrize(("given", "reported"), [(None, True), (True, True), (False, False)])
def test_a_response_says_whether_calls_may_be_parallel(given: bool | None, reported: bool) -> None:
    call = ResponseCall.__new__(ResponseCall)
    call._asked_for = ResponsesRequest(model="m", input="a", parallel_tool_calls=given)
    call.id, call.created, call.params = "resp", 0, SamplingParams()
    call.model = SimpleNamespace(name="m")  # type: ignore[assignment]
    assert call._response("in_progress")["parallel_tool_calls"] is reported


@pytest.mark.parametrize("place", ["/tmp/ingot-text-7", "/srv/e/tokenizer"])
def test_errors_name_the_model_and_no_place_of_the_server(place: str) -> None:
    """Neither the engine's folder nor the copies that long prompts are read from."""
    model = ServedModel.__new__(ServedModel)
    model._closed, model.name = False, "m"
    files = SimpleNamespace(folder=Path("/tmp/ingot-text-7"), origin=Path("/srv/e/tokenizer"))
    model.side = SimpleNamespace(folder=Path("/srv/e"), files=files)  # type: ignore[assignment]
    reported = model._api_error(
        RequestError(f"{place}/chat_template.jinja refuses these messages"), "messages"
    )
    assert reported.message == "m/tokenizer/chat_template.jinja refuses these messages"
    assert reported.param == "messages"


@pytest.mark.parametrize(("asked", "room"), [(None, 1), (0, 0), (3, 3)])
def test_a_prompt_leaves_room_for_the_tokens_that_are_asked_for(asked: int | None, room: int) -> None:
    """One that is only read may be as long as the engine takes."""
    model = ServedModel.__new__(ServedModel)
    model.max_seq_len, limits = 8, SimpleNamespace(max_seq_len=8, vocab_size=9)
    model.engine = SimpleNamespace(limits=limits)  # type: ignore[assignment]
    model.prompt_ids = lambda prompt: prompt  # type: ignore[method-assign, assignment, misc]
    call = CompletionCall.__new__(CompletionCall)
    call.model, call._n, call._echo, call._logprobs, call._params = model, 1, True, None, None
    call._asked, call._prompts = asked, [[1] * (8 - room)]
    assert [len(job.ids) for job in call.jobs()] == [8 - room]
    call._prompts = [[1] * (9 - room)]
    with pytest.raises(ApiError) as error:
        call.jobs()
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    "error",
    [ProcessEndedError("took too long"), RequestError("no audio"), OSError("the upload is gone")],
    ids=lambda one: type(one).__name__,
)
def test_a_file_that_cannot_be_decoded_gives_its_process_back(error: Exception, closed: bool) -> None:
    """Whether its bytes cannot be read, or what they hold; else the third such file would wait for ever."""

    def fail(*_: object) -> bytes:
        raise error

    service = SpeechService.__new__(SpeechService)
    service._closed, service._most_seconds, service._processes = closed, 1.0, SimpleQueue()
    service._processes.put(SimpleNamespace(ask_bytes=fail))  # type: ignore[arg-type]
    for data in (lambda: b"RIFF", fail):
        with pytest.raises(OSError if isinstance(error, OSError) else ApiError) as caught:
            service._samples(data)
        assert service._processes.qsize() == 1
        if isinstance(caught.value, ApiError):
            stops = closed and isinstance(error, ProcessEndedError)
            expected = (503, None) if stops else (400, "file")
            assert (caught.value.status, caught.value.param) == expected


@pytest.mark.parametrize(
    ("score", "n", "stream", "fits"),
    [
        (0, 1, False, [True, True]),  # each prompt token has its own, whatever else is asked for
        (0, 3, False, [True, False]),
        (2, 1, False, [True, False]),
        (2, 2, False, [False, False]),
        (2, 2, True, [True, True]),
        (None, 9, False, [True, True]),
    ],
)
def test_log_probabilities_of_an_echo_are_counted_before_any_work(
    monkeypatch: pytest.MonkeyPatch, score: int | None, n: int, stream: bool, fits: list[bool]
) -> None:
    """Of prompts of 4 and 5 tokens, where 12 are held: those of each token and of the likeliest beside it."""
    monkeypatch.setattr(completions, "MOST_LOGPROBS", 12)
    for count, is_held in zip((4, 5), fits, strict=True):
        call = CompletionCall.__new__(CompletionCall)
        call._prompts, call._n, call._echo, call._logprobs = [[1] * (count - 1), [1]], n, True, score
        call._params, call._asked = None, 0
        call.body = SimpleNamespace(stream=stream)  # type: ignore[assignment]
        call.model = SimpleNamespace(  # type: ignore[assignment]
            prompt_ids=lambda prompt: prompt, check_ids=lambda *_: None
        )
        if is_held:
            assert len(call.jobs()) == 2
            continue
        with pytest.raises(ApiError) as caught:
            call.jobs()
        assert (caught.value.status, caught.value.code) == (400, "answer_too_large")
