"""``ingot chat --url``: the terminal chat over HTTP, and its error messages."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from ingot import LLM, SamplingParams
from ingot.llm.conversation import Conversation
from ingot.serve import remote_chat as remote
from tests.e2e.terminal import ingot
from tests.serve.client import Server, wait_for
from tests.serve.conftest import NAME

PIECE = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'


def chat(url: str, *lines: str, words: tuple[object, ...] = ()) -> Any:
    return ingot("chat", "--url", url, *words, stdin="".join(f"{line}\n" for line in lines))


@pytest.fixture
def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


@contextmanager
def answering(
    status: int, data: bytes, kind: str = "text/event-stream", seconds: float = 0.0
) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives every question this answer after a while; with what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(seconds)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_port}", asked
        finally:
            found.shutdown()
            thread.join()


def test_it_is_the_same_chat(url: str, llm: LLM) -> None:
    """Answers and memory are those of a chat with the engine itself."""
    values = {"max_new_tokens": 24, "temperature": 0.7, "seed": 5, "top_k": 20}
    talk = Conversation(llm, "Be brief.", SamplingParams(**values))  # type: ignore[arg-type]
    answers = ["".join(p.text for p in talk.ask(text)) for text in ("What is 12 + 30?", "And 3 more?")]
    words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]
    for path in ("", "/", "/v1", "/v1/"):
        result = chat(url + path, "What is 12 + 30?", "And 3 more?", words=("--system", "Be brief.", *words))
        assert result.exit_code == 0, result.stderr
        assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    result = chat(url, "Tell me a story.", words=("--max-new-tokens", 3, "--model", NAME))
    assert "cut off; --max-new-tokens" in result.stderr


def test_old_turns_that_no_longer_fit_are_dropped(url: str) -> None:
    lines = [f"{'word ' * 150}What is {i} + 30?" for i in range(4)]
    result = chat(url, *lines, words=("--max-new-tokens", 12))
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 4
    assert result.stderr.count("the oldest turns no longer fit") == 1
    result = chat(url, "word " * 5000, "What is 12 + 30?")
    assert result.exit_code == 1
    assert "too long for the server" in result.stderr
    assert result.stdout == "12 + 30 = 42.\n"


def test_commands_and_the_place_on_the_server(url: str, server: Server) -> None:
    result = chat(url, "/system Be brief.", "/system", "/clear", "What is 12 + 30?", "/exit", "never")
    assert (result.exit_code, result.stdout) == (0, "12 + 30 = 42.\n")
    assert result.stderr.count("system: Be brief.") == 2
    wait_for("its place to be free", server.idle)


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        ((), 2, "give an engine, or --url"),
        (("engines/x", "--url", "http://127.0.0.1:1"), 2, "give an engine, or --url"),
        (("--url", "127.0.0.1:8000"), 2, "http://HOST:PORT"),
        (("--url", "ftp://127.0.0.1"), 2, "http://HOST:PORT"),
        (("--url", "http://"), 2, "http://HOST:PORT"),
        (("--url", "http://127.0.0.1:port"), 2, "http://HOST:PORT"),
        (("--url", "http://[::1"), 2, "http://HOST:PORT"),
        (("--url", "http://127.0.0.1:1", "--device", "cpu"), 2, "--device"),
        (("--url", "http://127.0.0.1:1", "--max-batch-size", "2"), 2, "--max-batch-size"),
        (("--url", "http://127.0.0.1:1", "--api-key", "a\nb"), 2, "printable"),
        (("--url", "http://127.0.0.1:1", "--temperature", "-1"), 2, "--temperature"),
        (("--url", "http://127.0.0.1:1"), 1, "no server answers"),
        (("--url", "http://127.0.0.1:1", "--model", "m"), 1, "no server answers"),
        (("--url", "http://no-such-host.invalid"), 1, "no server answers"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_begin(words: tuple[str, ...], code: int, reported: str) -> None:
    result = ingot("chat", *words, stdin="Hi\n")
    assert (result.exit_code, reported in result.stderr) == (code, True), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("status", "data", "reported"),
    [
        (401, b'{"error": {"message": "wrong key", "code": null}}', "wrong key"),
        (401, b"", "--api-key"),
        (404, b'{"error": {"message": "no such model"}}', "--model"),
        (500, b"<html>", "500"),
        (302, b"", "302"),
        (200, b"", "broke off"),
        (200, PIECE, "broke off"),
        (200, PIECE + b'data: {"error": {"message": "lost: \\u001b[31m"}}\n\n', "lost: "),
        (200, b"data: {\n\n", "broke off"),
        (200, b"data: []\n\n", "broke off"),
        (200, b'data: {"choices": [3]}\n\n', "broke off"),
        (200, b'data: {"choices": [{"delta": {"content": 3}}]}\n\n', "broke off"),
        (400, b'{"error": "maximum context length is 8"}', "too long for the server"),
        (413, b'{"error": {"message": "larger than 9 bytes"}}', "too large for the server"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_server_that_refuses_or_breaks_off(status: int, data: bytes, reported: str) -> None:
    with answering(status, data) as (url, asked):
        result = chat(url, "Hi", "Hi again", words=("--model", "m"))
    assert (result.exit_code, len(asked) >= 2, reported in result.stderr) == (1, True, True), result.stderr
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.stderr


def test_what_other_servers_send() -> None:
    """Comments, events without choices, roles, thoughts, and an end without ``[DONE]``."""
    odd = b': ping\n\ndata: {"choices": []}\n\ndata: {"choices": [{"delta": {"role": "assistant", "content": '
    odd += b'null, "reasoning_content": "hm"}}], "usage": null}\n\n'
    with answering(200, odd + PIECE + END) as (url, asked):
        words = ("--model", "m", "--max-new-tokens", 4, "--stop", "x", "--ignore-eos")
        result = chat(url, "One", "Two", words=words)
    assert (result.exit_code, result.stdout) == (0, "Hi\nHi\n")
    assert asked[1] == {
        "model": "m",
        "max_tokens": 4,
        "stop": ["x"],
        "ignore_eos": True,
        "messages": [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "Two"},
        ],
        "stream": True,
    }


def test_values_that_are_set_reach_the_server() -> None:
    with answering(200, PIECE + END) as (url, asked):
        lines = ("/set max_new_tokens 4", "/set temperature 0.5", "One", "/set temperature default", "/retry")
        result = chat(url, *lines, words=("--model", "m", "--seed", 3))
    assert (result.exit_code, result.stdout) == (0, "Hi\nHi\n"), result.stderr
    one = [{"role": "user", "content": "One"}]
    common = {"model": "m", "messages": one, "seed": 3, "max_tokens": 4, "stream": True}
    assert asked[-2:] == [{**common, "temperature": 0.5}, common]


def test_a_server_without_a_list_of_models() -> None:
    with answering(200, PIECE + END) as (url, _):
        result = chat(url, "Hi")
    assert (result.exit_code, "--model" in result.stderr) == (1, True)


def test_no_engine_is_loaded() -> None:
    code = (
        "import sys; import ingot.serve.remote_chat; print('torch' in sys.modules, 'fastapi' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False False\n"


def test_an_answer_may_take_longer_than_reaching_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CONNECT_SECONDS", 0.05)
    with answering(200, PIECE + END, seconds=0.2) as (url, _):
        pieces = list(remote.RemoteServer(url).chat({"messages": []}))
    assert [piece.text for piece in pieces] == ["Hi", ""]
