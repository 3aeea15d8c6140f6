"""Long prompts are tokenized in another process, to the same ids, without delaying other requests."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM
from ingot.engine.manifest import TOKENIZER_FOLDER, Manifest
from ingot.errors import RequestError
from ingot.llm.prompt_inputs import Chat
from ingot.serve.http.http_bodies import MOST_COMMAS, MOST_OPENED
from ingot.serve.long_prompts import LONG, LongPromptError, LongPrompts, is_long
from tests.serve.client import Server
from tests.serve.conftest import MAX_SEQ_LEN, chat, completion

TALK: list[dict[str, Any]] = [
    {"role": ("user", "assistant")[i % 2], "content": f"Say <|im_end|> {i} times, ünï 你"} for i in range(31)
]


@pytest.fixture(scope="module")
def long(engine: Path) -> Iterator[LongPrompts]:
    found = LongPrompts(engine / TOKENIZER_FOLDER, Manifest.read(engine), most=2000)
    yield found
    found.close()


def test_the_ids_are_those_of_this_process(long: LongPrompts, llm: LLM) -> None:
    text = "Grüße <|im_start|> 12 + 30\n"
    assert long.chat_ids(Chat(TALK))[0] == llm.chat_ids(TALK)
    assert long.prompt_ids(text) == llm.prompt_ids(text)
    assert llm.tokenizer is not None
    assert long.prompt_ids(text, add_special_tokens=False) == llm.tokenizer.encode(
        text, add_special_tokens=False
    )


def test_errors_are_those_of_this_process(long: LongPrompts, llm: LLM) -> None:
    wrong = Chat([{"role": "wizard", "content": "Hi"}])
    with pytest.raises(RequestError) as theirs:
        long.chat_ids(wrong)
    with pytest.raises(RequestError) as ours:
        llm.chat_ids(wrong)
    assert str(theirs.value) == str(ours.value)


def test_for_too_many_ids_only_their_number_is_returned(long: LongPrompts) -> None:
    with pytest.raises(LongPromptError) as caught:
        long.prompt_ids("a b " * 1500)
    assert caught.value.count > 2000


def test_a_process_that_dies_fails_one_prompt(long: LongPrompts) -> None:
    long.prompt_ids("Hi")
    running = long._process._running
    assert running is not None
    os.kill(running.process.pid, signal.SIGKILL)
    with pytest.raises(RequestError, match="the prompt crashes"):
        long.prompt_ids("Hi")
    assert long.prompt_ids("Hi")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("a" * LONG, True),
        ("a" * (LONG // 2), False),
        ([{"role": "user", "content": "Hi"}], False),
        ([{"role": "user", "content": "Hi"}] * 200, True),
        ([{"role": "user", "content": [{"type": "text", "text": "a" * LONG}]}], True),
        ([[]] * 1_000_000, True),
    ],
)
def test_what_is_long(value: Any, wanted: bool) -> None:
    assert is_long(value) is wanted


def test_a_long_prompt_is_served_and_a_too_long_one_refused(server: Server) -> None:
    text = "x" * (LONG + 1)
    reply = server.post("/tokenize", {"prompt": text})
    assert reply.status == 200
    assert reply.json["count"] == len(reply.json["tokens"]) > MAX_SEQ_LEN
    for body, path in ((chat(text * 50), "/v1/chat/completions"), (completion(text), "/v1/completions")):
        error = server.post(path, body).error
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {MAX_SEQ_LEN}" in error["message"]


@pytest.mark.slow
def test_short_requests_pass_long_ones(server: Server) -> None:
    """More long prompts than there are threads by default wait for the one process, which hangs."""
    body = chat("fire water " * 100_000)
    server.post("/v1/chat/completions", body)
    (worker,) = server.child_pids(b"prompt_worker")
    errors: list[str] = []
    asking = [
        threading.Thread(
            target=lambda: errors.append(server.post("/v1/chat/completions", body).error["code"])
        )
        for _ in range(16)
    ]
    os.kill(worker, signal.SIGSTOP)
    try:
        for one in asking:
            one.start()
        for _ in range(5):
            assert server.post("/v1/chat/completions", chat(max_tokens=1)).status == 200
        assert errors == []
    finally:
        os.kill(worker, signal.SIGCONT)
    for one in asking:
        one.join()
    assert errors == ["context_length_exceeded"] * 16


@pytest.mark.parametrize(
    "value", [[[]] * (MOST_OPENED + 1), [0] * (MOST_COMMAS + 2)], ids=["objects", "commas"]
)
def test_bodies_of_too_many_values_are_refused_unread(server: Server, value: Any) -> None:
    reply = server.post("/v1/completions", completion(value))
    assert (reply.status, reply.error["code"]) == (400, "request_too_large")
