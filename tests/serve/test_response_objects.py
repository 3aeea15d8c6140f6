"""Every field of a response object, at each of its endings. No server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.config.sampling_params import SamplingParams
from ingot.llm.outputs import Answer, Piece
from ingot.serve.api.answer_parts import AnswerParts
from ingot.serve.api.responses import ResponseCall
from ingot.serve.api_errors import ApiError
from ingot.serve.request_schemas import ResponsesRequest, TextOptions

JOBS = [SimpleNamespace(ids=[1, 2, 3, 4, 5])]
FORMAT = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
NAMED: dict[str, Any] = {
    "instructions": "Be brief.",
    "max_output_tokens": 7,
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low"},
    "text": TextOptions(FORMAT),
    "tool_choice": "required",
    "tools": [FUNCTION],
    "metadata": {"a": "b"},
    "user": "u",
}
PLAIN = {
    "id": "resp-1",
    "object": "response",
    "created_at": 5,
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 0.25,
    "truncation": "disabled",
    "metadata": {},
}


def made(**values: Any) -> ResponseCall:
    call = ResponseCall.__new__(ResponseCall)
    call._asked_for, call._sequence = ResponsesRequest(model="m", input="a", **values), 0
    call.id, call.created, call.params = "resp-1", 5, SamplingParams(temperature=0.5, top_p=0.25)
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: text.split())
    call.model = SimpleNamespace(name="m", tokenizer=tokenizer)  # type: ignore[assignment]
    call.new_parts = lambda: AnswerParts(thoughts="may", calls=False, most_calls=None)  # type: ignore
    return call


class Found:
    """Pieces of one answer, and how it ends: by its last piece, or by an error."""

    def __init__(self, pieces: Sequence[Piece], error: ApiError | None = None) -> None:
        self.jobs, self.reused, self.error = JOBS, {0: 2}, error
        self.given = pieces
        self.num_tokens = sum(len(one.token_ids) for one in pieces)

    def answers(self, position: int) -> list[Answer]:
        ids = [token for one in self.given for token in one.token_ids]
        text = "".join(one.text for one in self.given)
        return [Answer(token_ids=ids, text=text, finish_reason=self.given[-1].finish_reason)]

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        for one in self.given:
            yield 0, one
        if self.error is not None:
            raise self.error


async def streamed(call: ResponseCall, found: Any) -> list[dict[str, Any]]:
    return [json.loads(data.split(b"data: ")[1]) async for data in call.chunks(found)]


def test_a_response_names_what_is_used() -> None:
    assert made()._response("in_progress") == PLAIN


def test_a_response_repeats_what_was_asked_for() -> None:
    echoed = {
        "reasoning": {"effort": "low", "summary": None},
        "text": {"format": FORMAT},
        "tools": [{"strict": None, **FUNCTION}],
    }
    assert made(**NAMED)._response("queued") == PLAIN | NAMED | echoed | {"status": "queued"}


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [("stop", "completed", None), ("length", "incomplete", {"reason": "max_output_tokens"})],
)
async def test_a_response_and_its_last_event_are_the_same(
    reason: str, status: str, details: dict[str, str] | None
) -> None:
    pieces = [Piece("<think>one two</think>", (1, 2)), Piece("Hi", (3,), 0, reason)]
    whole = made().full_answer(Found(pieces))  # type: ignore[arg-type]
    events = await streamed(made(), Found(pieces))
    last = events[-1]["response"]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert [one["response"] for one in events[:2]] == [PLAIN, PLAIN]
    assert events[-1]["type"] == f"response.{status}"
    for found in (whole, last):
        thoughts, message = found.pop("output")
        assert (thoughts["type"], thoughts["content"][0]["text"]) == ("reasoning", "one two")
        assert (message["type"], message["content"][0]["text"]) == ("message", "Hi")
        assert (thoughts["status"], message["status"]) == ("completed", status)
        assert (found.pop("completed_at") is None) == (status == "incomplete")
        assert found | {"output": [], "completed_at": None} == PLAIN | {
            "status": status,
            "incomplete_details": details,
            "usage": {
                "input_tokens": 5,
                "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 2},
                "total_tokens": 8,
            },
        }


async def test_a_failed_response_keeps_its_items() -> None:
    call, lost = made(), ApiError(500, "m: gone", code="engine_dead")
    events = await streamed(call, Found([Piece("Hi", (1,)), Piece(" there", (2,))], lost))
    last = events[-1]
    assert last["type"] == "response.failed"
    (item,) = last["response"].pop("output")
    assert (item["type"], item["content"][0]["text"]) == ("message", "Hi there")
    error = {"code": "server_error", "message": "m: gone"}
    assert last["response"] | {"output": []} == PLAIN | {"status": "failed", "error": error}
