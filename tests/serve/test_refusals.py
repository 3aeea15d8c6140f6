"""Unsupported requests are refused before any work, with a status, a field and a helpful message."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest

from tests.serve.client import JSON, Server
from tests.serve.conftest import MAX_SEQ_LEN, NAME, chat, completion

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

# Values beside a good body → the field that the error names.
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**40}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a" * 1001]}, "stop[0]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "Hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [TOOL["function"]]}, "functions"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"logit_bias": {"one": 5}}, "logit_bias"),
    ({"logit_bias": {"1000000": 5}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "messages"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt": ["a"] * 20, "n": 128}, "n"),
]
NESTED = '{"a":' * 5000 + "1" + "}" * 5000
BAD_JSON: dict[str, bytes] = {
    "empty": b"",
    "half": b'{"model": "pocket", "mess',
    "a list": b"[]",
    "text": b"hello",
    "NaN": json.dumps(chat(temperature=float("nan"))).encode(),
    "Infinity": json.dumps(chat(temperature=float("inf"))).encode(),
    "NaN in a field that nobody reads": json.dumps(chat(unknown=float("nan"))).encode(),
    "a number beyond floats": b'{"model": "pocket", "messages": [], "temperature": 1e999}',
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "half a character": b'{"model": "pocket", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "deep": f'{{"model": "pocket", "messages": [], "unknown": {NESTED}}}'.encode(),
    "deep in a message": json.dumps(chat()).encode()[:-1] + f', "chat_template_kwargs": {NESTED}}}'.encode(),
}


@pytest.mark.parametrize(("values", "field"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_chat(server: Server, values: dict[str, Any], field: str) -> None:
    for stream in (False, True):
        reply = server.post(CHAT, chat(stream=stream) | values)
        assert reply.status == 400, reply.data
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["param"] == field
        assert reply.error["message"]


@pytest.mark.parametrize(("values", "field"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_completion(server: Server, values: dict[str, Any], field: str) -> None:
    reply = server.post(COMPLETIONS, completion() | values)
    assert reply.status == 400, reply.data
    assert reply.error["param"] == field


@pytest.mark.parametrize("data", BAD_JSON.values(), ids=BAD_JSON)
def test_bad_json(server: Server, data: bytes) -> None:
    reply = server.post(CHAT, data)
    assert reply.status == 400, reply.data
    assert reply.error["type"] == "invalid_request_error"


def test_what_is_missing_is_named(server: Server) -> None:
    body = chat()
    del body["messages"]
    assert server.post(CHAT, body).error["param"] == "messages"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_the_only_model_need_not_be_named(server: Server, path: str) -> None:
    values: dict[str, Any] = {
        CHAT: {"messages": chat()["messages"], "max_tokens": 1},
        "/v1/completions": {"prompt": "A", "max_tokens": 1},
        "/v1/responses": {"input": "A", "max_output_tokens": 1},
        "/v1/embeddings": {"input": "A"},
    }[path]
    for unnamed in (values, values | {"model": None}):
        reply = server.post(path, unnamed)
        assert (reply.status, reply.json["model"]) == (200, NAME)


@pytest.mark.parametrize(
    "values",
    [
        {"user": "me", "store": True, "metadata": {"a": "b"}, "no_such_field": [1]},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}},
        dict.fromkeys(("stop", "seed", "temperature", "max_tokens", "n", "tools", "stream_options", "top_k")),
        {"chat_template_kwargs": {}, "modalities": ["text"]},
    ],
)
def test_neutral_values_are_accepted(server: Server, values: dict[str, Any]) -> None:
    assert server.post(CHAT, chat() | values).json["choices"] == server.post(CHAT, chat()).json["choices"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, completion([1] * MAX_SEQ_LEN), "prompt"),
        (COMPLETIONS, completion("word " * 5000), "prompt"),
        (COMPLETIONS, completion(max_tokens=MAX_SEQ_LEN), "prompt"),
        (COMPLETIONS, completion([1] * (MAX_SEQ_LEN + 1), max_tokens=0, echo=True), "prompt"),
        (CHAT, chat("word " * 5000), "messages"),
        (CHAT, chat(max_tokens=MAX_SEQ_LEN), "messages"),
    ],
    ids=range(6),
)
def test_a_prompt_that_is_too_long(server: Server, path: str, body: dict[str, Any], field: str) -> None:
    before = server.metric("ingot_prompt_tokens_total")
    reply = server.post(path, body | {"stream": True})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        400,
        "context_length_exceeded",
        field,
    )
    assert str(MAX_SEQ_LEN) in reply.error["message"]
    assert server.metric("ingot_prompt_tokens_total") == before


def test_a_prompt_that_just_fits(server: Server) -> None:
    found = server.post(COMPLETIONS, completion([65] * (MAX_SEQ_LEN - 2), max_tokens=2, ignore_eos=True))
    assert found.json["usage"]["total_tokens"] == MAX_SEQ_LEN


def test_an_unknown_model(server: Server) -> None:
    reply = server.post(CHAT, {**chat(), "model": "gpt-5"})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert NAME in reply.error["message"]


def test_a_body_whose_type_is_not_json(server: Server) -> None:
    """A page of another site may send text to this address, and no JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        reply = server.request("POST", CHAT, chat(), {"Content-Type": kind})
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    kind = "application/json; charset=utf-8"
    assert server.request("POST", CHAT, chat(max_tokens=1), {"Content-Type": kind}).status == 200


def test_an_oversize_body(server: Server) -> None:
    body = b" " * (8 << 20) + json.dumps(chat(max_tokens=1)).encode()
    reply = server.post(CHAT, body)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert server.post(CHAT, body[200:]).status == 200


def test_an_oversize_chunked_body(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON['Content-Type']}\r\n"
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(129):
            connection.sendall(piece)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("header", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_other_names_and_pages(server: Server, header: dict[str, str]) -> None:
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", CHAT)):
        reply = server.request(method, path, chat() if method == "POST" else None, JSON | header)
        assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    local = {"Host": f"localhost:{server.port}", "Origin": "http://localhost:7860"}
    assert server.request("GET", "/v1/models", headers=local).status == 200


def test_head_has_no_body_and_two_lengths_end_a_connection(server: Server) -> None:
    found = server.request("HEAD", "/health")
    assert (found.status, found.data, found.headers["content-length"]) == (200, b"", "15")
    both = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(both)
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert data.startswith(b"HTTP/1.1 400 ")
    assert data.count(b"HTTP/1.1 ") == 1


def test_headers_are_bounded(server: Server) -> None:
    reply = server.request("GET", "/version", headers={"X-Long": "a" * 70_000})
    assert (reply.status, reply.error["code"]) == (431, "headers_too_large")
    endless = b"GET /version HTTP/1.1\r\nX-Long: " + b"a" * 1_000_000
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(endless)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [{}, {"prompt": 1}, {"tokens": ["a"]}, {"tokens": [-1]}])
def test_bad_tokens(server: Server, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, body).status == 400


def test_both_a_prompt_and_messages(server: Server) -> None:
    assert server.post("/tokenize", {"prompt": "Hi", "messages": chat()["messages"]}).status == 400


def test_errors_do_not_reveal_paths(server: Server, engine: Any) -> None:
    found = [server.post(CHAT, chat() | values).data for values, _ in BAD_CHATS]
    assert not [data for data in found if str(engine.parent).encode() in data]
