"""A client that disconnects frees its place; one that reads slowly loses only its own request."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ingot.serve.api_errors import bad_request
from ingot.serve.served_model import ServedModel
from ingot.serve.speech_service import _in
from tests.serve.client import Server, started, wait_for
from tests.serve.conftest import chat, completion

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key, for two requests at once and one that waits, whose clients must keep up; its
    engine has no proof.
    """
    unproven = Path(shutil.copytree(engine, tmp_path_factory.mktemp("unproven") / engine.name))
    (unproven / "proof.json").unlink()
    words = ("--max-batch-size", 2, "--max-queue", 1, "--max-unread", 40, "--max-body", 4096)
    with started(unproven, "--unproven", *words, "--api-key", "sesame") as found:
        found.headers = {"Authorization": "Bearer sesame"}
        yield found


def opened(
    server: Server, body: dict[str, object], receive_buffer: int | None = None, path: str = COMPLETIONS
) -> socket.socket:
    """A connection on which a request was sent."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\n" + "".join(f"{k}: {v}\r\n" for k, v in server.headers.items())
    connection.sendall(head.encode() + b"\r\n" + data)
    return connection


def running(server: Server) -> float:
    return server.metric("ingot_num_requests_running")


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_place(server: Server, stream: bool) -> None:
    before = server.metric("ingot_generation_tokens_total")
    connection = opened(server, completion(**LONG, n=4, stream=stream))
    wait_for("its requests to run", lambda: running(server) == 4)
    connection.close()
    wait_for("its place to be free", server.idle)
    assert server.metric("ingot_generation_tokens_total") - before < 4 * LONG["max_tokens"] / 2
    assert server.metric("ingot_kv_cache_usage_perc") == 0


def test_who_leaves_a_stream_in_the_middle(server: Server) -> None:
    stream = server.stream(CHAT, chat("Tell me a story.", **LONG))
    for _, chunk in zip(range(5), stream, strict=False):
        assert chunk["choices"][0]["finish_reason"] is None
    assert running(server) == 1
    stream.close()
    wait_for("its place to be free", server.idle)


def test_a_client_that_disconnects_before_its_body_is_complete(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
        head += "Content-Length: 500\r\nContent-Type: application/json"
        connection.sendall(head.encode() + b'\r\n\r\n{"model"')
    assert server.post(CHAT, chat(max_tokens=1)).status == 200


def test_a_stop_string_frees_the_place(server: Server) -> None:
    before = server.metric("ingot_generation_tokens_total")
    reply = server.post(COMPLETIONS, completion(**LONG, stop=[" the"]))
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    wait_for("its place to be free", server.idle)
    assert server.metric("ingot_generation_tokens_total") - before < LONG["max_tokens"] / 2


@pytest.mark.slow
def test_who_reads_nothing_loses_the_request_alone(small: Server) -> None:
    """Another stream goes on and ends well; the engine's place is free long before the answer would end."""
    values = {**LONG, "logprobs": True, "top_logprobs": 20, "stream": True}
    lazy = opened(small, chat("Hi", **values), receive_buffer=4096, path=CHAT)
    wait_for("it to run", lambda: running(small) == 1)
    events = small.events(CHAT, chat("Tell me a story.", max_tokens=300, ignore_eos=True))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    wait_for("its place to be free", small.idle)
    assert small.metric("ingot_request_success_total", finished_reason="length") == 1
    lazy.close()


def test_a_full_queue(small: Server) -> None:
    """Two run, one waits, and the next gets Retry-After; then there is room again."""
    streams = [small.stream(COMPLETIONS, completion(**LONG)) for _ in range(2)]
    waiting = opened(small, completion(max_tokens=1))
    wait_for("the queue to be full", lambda: small.metric("ingot_num_requests_waiting") == 1)
    reply = small.post(COMPLETIONS, completion(max_tokens=1))
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    assert small.post(COMPLETIONS, completion(n=4)).status == 400
    assert small.get("/health").status == 200
    for stream in streams:
        stream.close()
    assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    wait_for("its place to be free", small.idle)
    assert small.post(COMPLETIONS, completion(max_tokens=1)).status == 200


@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer sesam", "Bearer sesame ", "sesame", "Bearer sésame"]
)
def test_the_key(small: Server, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key.encode("latin-1")}
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/none"), ("POST", CHAT)):
        reply = small.request(method, path, headers=headers)  # type: ignore[arg-type]
        if key == "Bearer sesame ":  # white space at the end is no part of a header
            assert reply.status != 401
            continue
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert small.request("GET", "/health", headers=headers).status == 200  # type: ignore[arg-type]


def test_an_engine_without_a_proof_is_reported(server: Server, small: Server) -> None:
    (model,) = small.get("/v1/models").json["data"]
    assert model["unproven"] == "the engine is unproven: it was built without golden cases"
    assert model["unproven"] in "".join(small.lines)
    assert small.metric("ingot_engine_proven") == 0
    assert server.metric("ingot_engine_proven") == 1
    assert "unproven" not in "".join(server.lines)


def test_the_bound_on_bodies_is_a_flag(small: Server) -> None:
    assert small.post(CHAT, chat("a" * 4096)).status == 413


def test_nothing_is_left_running(server: Server, small: Server) -> None:
    for one in (server, small):
        wait_for("both to be idle", one.idle)
        assert one.metric("ingot_kv_cache_usage_perc") == 0


async def test_what_is_wrong_with_a_request_whose_client_left_is_not_logged() -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    begun, left = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        left.wait()
        raise bad_request("no chat template", "messages")

    with ThreadPoolExecutor(1) as threads:
        model = cast(ServedModel, SimpleNamespace(_threads=threads))
        task = asyncio.create_task(ServedModel.in_thread(model, work))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        left.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    del task
    gc.collect()  # asyncio logs an error that nobody asked for when its future goes
    await asyncio.sleep(0)
    assert logged == []


async def test_who_is_cancelled_twice_waits_for_the_thread_that_writes_for_him() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    written = []

    def work() -> None:
        begun.set()
        goes_on.wait()
        written.append(True)

    with ThreadPoolExecutor(1) as threads:
        task = asyncio.create_task(_in(threads, work))
        await asyncio.to_thread(begun.wait)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert written == [True]
