"""``/chat/`` and ``/stream_chat/``: the answers of the chat endpoint in the shape of 2023's clients."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.config.sampling_params import SamplingParams
from ingot.serve.api.chat_completions import ChatCall
from ingot.serve.api.simple_chat import SimpleChat
from ingot.serve.engine_calls.answering import Job
from tests.serve.client import Server, wait_for
from tests.serve.conftest import MAX_SEQ_LEN, chat

HISTORY = [["What is 12 + 30?", "12 + 30 = 42."]]
BODY: dict[str, Any] = {"prompt": "Tell me a story about a fox.", "history": HISTORY}


def as_chat(server: Server, **values: Any) -> str:
    """What the chat endpoint says to the same conversation."""
    said = [{"role": "user", "content": HISTORY[0][0]}, {"role": "assistant", "content": HISTORY[0][1]}]
    body = chat(BODY["prompt"], **values)
    reply = server.post("/v1/chat/completions", body | {"messages": said + body["messages"]})
    return str(reply.json["choices"][0]["message"]["content"])


@pytest.mark.parametrize("path", ["/chat/", "/chat"])
def test_an_answer(server: Server, path: str) -> None:
    found = server.post(path, BODY | {"max_tokens": 12}).json
    text = as_chat(server, max_tokens=12)
    assert found["response"] == text
    assert found["history"] == [*HISTORY, [BODY["prompt"], text]]
    assert found["status"] == 200
    assert time.strptime(found["time"], "%Y-%m-%d %H:%M:%S")
    assert set(found) == {"response", "history", "status", "time"}


def test_a_query_without_history(server: Server) -> None:
    for history in ({}, {"history": []}, {"history": None}):
        found = server.post("/chat/", {"query": "What is 12 + 30?", **history}).json
        assert found["history"] == [["What is 12 + 30?", "12 + 30 = 42."]]


def test_values(server: Server) -> None:
    greedy = server.post("/chat/", BODY | {"temperature": 0, "max_tokens": 12}).json["response"]
    narrow = server.post("/chat/", BODY | {"temperature": 2, "top_p": 1e-6, "max_tokens": 12}).json[
        "response"
    ]
    assert greedy == narrow == as_chat(server, max_tokens=12)


def test_max_length_counts_the_prompt(server: Server) -> None:
    body = chat(BODY["prompt"], max_tokens=1)
    said = [{"role": "user", "content": HISTORY[0][0]}, {"role": "assistant", "content": HISTORY[0][1]}]
    usage = server.post("/v1/chat/completions", body | {"messages": said + body["messages"]}).json["usage"]
    tokens = usage["prompt_tokens"]
    found = server.post("/chat/", BODY | {"max_length": tokens + 5}).json["response"]
    assert found == as_chat(server, max_tokens=5)
    assert server.post("/chat/", BODY | {"max_length": tokens}).error["param"] == "max_length"
    assert server.post("/chat/", BODY | {"max_length": 10 * MAX_SEQ_LEN}).status == 200


@pytest.mark.parametrize("path", ["/stream_chat/", "/stream_chat"])
def test_a_stream(server: Server, path: str) -> None:
    whole = server.post("/chat/", BODY | {"max_tokens": 12}).json
    events = list(server.stream(path, BODY | {"max_tokens": 12}))
    text = ""
    for one in events:
        text += one["delta"]
        assert one["response"] == text
    assert [one["finished"] for one in events] == [False] * (len(events) - 1) + [True]
    assert len(events) > 3
    last = {name: events[-1][name] for name in ("response", "history", "status")}
    assert last == {name: whole[name] for name in last}


def test_who_leaves_frees_the_place(server: Server) -> None:
    stream = server.stream("/stream_chat/", {"prompt": "Tell me a story.", "max_length": MAX_SEQ_LEN})
    next(iter(stream))
    stream.close()
    wait_for("its place to be free", server.idle)
    again = list(server.stream("/stream_chat/", {"prompt": "Hi", "max_length": 64}))
    assert again[-1]["finished"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"query": "Hi"}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"history": [["Hi"]]}, "history[0]"),
        ({"history": [["Hi", "Hi", "Hi"]]}, "history[0]"),
        ({"history": [["Hi", None]]}, "history[0][1]"),
        ({"history": "Hi"}, "history"),
        ({"max_length": 0}, "max_length"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": MAX_SEQ_LEN}, "messages"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused(server: Server, values: dict[str, Any], field: str) -> None:
    for path in ("/chat/", "/stream_chat/"):
        reply = server.post(path, BODY | values)
        assert (reply.status, reply.error["param"]) == (400, field), reply.data
    assert server.post("/chat/", BODY | {"model": "none"}).error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("max_length", "max_tokens", "limit"),
    [(10, None, 4), (10, 2, 2), (10, 50, 4), (99, 50, 6), (99, None, 6), (None, 50, 50)],
)
def test_the_smaller_of_two_limits_applies(
    max_length: int | None, max_tokens: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt of 6 tokens, where an engine takes 12."""
    job = Job([1] * 6, SamplingParams(max_new_tokens=max_tokens))
    monkeypatch.setattr(ChatCall, "jobs", lambda self: [job])
    call = SimpleChat.__new__(SimpleChat)
    call._max_length, call._asked = max_length, max_tokens
    call.model = SimpleNamespace(max_seq_len=12)  # type: ignore[assignment]
    (found,) = call.jobs()
    assert found.params is not None
    assert found.params.max_new_tokens == limit
