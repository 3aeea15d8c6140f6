"""Faults under load: hundreds of disconnects, a GPU that fails in the tenth step, and garbage."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.client import Gate, Server, is_gone, memory, started, wait_for
from tests.serve.conftest import chat, completion
from tests.serve.test_ending import stream
from tests.serve.test_leaving import opened

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"max_tokens": 400, "ignore_eos": True}
CLIENTS = 200
TENTH = """
    from ingot.runtime.executor import Executor

    step, steps = Executor.step, []

    def failing(executor):
        steps.append(1)
        if len(steps) == 10:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(executor)

    Executor.step = failing
"""
COUNTS = """
import gc, os, signal

def tell(number, frame):
    with open(f"{folder}/{{os.getpid()}}", "w") as file:
        file.write(f"{{gc.get_freeze_count()}} {{len(gc.get_objects())}}\\n")

signal.signal(signal.SIGUSR1, tell)
"""


def leave(server: Server, number: int) -> None:
    """Read the first event of a stream, or nothing, and go: politely, or by a reset."""
    body = chat("Tell me a story about a fox.", **LONG, stream=True)
    connection = opened(server, body, path=CHAT)
    if number % 4:
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
    if number % 2:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.slow
def test_two_hundred_clients_that_leave(server: Server) -> None:
    """Slots and cache are free again each time, and once both processes are warm, no memory and no file stays
    taken: less than 20 kB for a client.
    """
    (engine,) = server.engine_pids()
    pids = (server.process.pid, engine)
    sizes, files = [], []
    for _ in range(3):
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(lambda number: leave(server, number), range(CLIENTS)))
        wait_for("all places to be free", server.idle)
        assert server.metric("ingot_kv_cache_usage_perc") == 0
        sizes.append([memory(pid) for pid in pids])
        wait_for("connections to be closed", lambda: not files or open_files(server) <= files[0])
        files.append(open_files(server))
    (_, _), (server_before, engine_before), (server_after, engine_after) = sizes
    assert server_after - server_before < 4 << 20
    assert engine_after - engine_before < 16 << 20  # a batch's tensors come and go; its cache is above
    assert server.post(CHAT, chat()).json["choices"][0]["message"]["content"] == "12 + 30 = 42."
    assert "Traceback" not in "".join(server.lines)


def open_files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def test_the_gpu_fails_in_the_tenth_step(engine: Path, tmp_path: Path) -> None:
    """Every open request ends by an error, the server says so while none lives, and it can be stopped."""
    gate = Gate(tmp_path, TENTH.strip())
    with started(engine, faults=tmp_path) as server, ThreadPoolExecutor(12) as pool:
        (pid,) = server.engine_pids()
        gate.close()
        streams = [pool.submit(stream, server, LONG) for _ in range(6)]
        whole = [pool.submit(server.post, COMPLETIONS, completion(**LONG)) for _ in range(4)]
        reading = pool.submit(server.post, "/v1/embeddings", {"model": "pocket", "input": [[65] * 500] * 64})
        for one in streams:
            *chunks, last = one.result()
            assert set(last) == {"error"}
            assert "CUDA error" in last["error"]["message"]
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
        for two in [*whole, reading]:
            assert (two.result().status, two.result().error["code"]) in (
                (500, "engine_dead"),
                (503, "engine_dead"),
            )
        wait_for("the engine's process to end", lambda: is_gone(pid))
        health = server.get("/health")
        assert health.status == 503
        assert "CUDA error" in health.error["message"]
        for path, body in ((CHAT, chat()), ("/v1/embeddings", {"model": "pocket", "input": "Hi"})):
            reply = server.post(path, body)
            assert (reply.status, reply.error["code"]) == (503, "engine_dead")
        assert server.post("/tokenize", {"prompt": "Hi"}).status == 503
        assert server.metric("ingot_engine_alive") == 0
        server.process.terminate()
        assert server.process.wait(timeout=30) == 0


@pytest.mark.slow
def test_collections_leave_out_what_is_loaded(engine: Path, tmp_path: Path) -> None:
    """200,000 objects: every stream would wait while a full collection looks at them."""
    (tmp_path / "sitecustomize.py").write_text(COUNTS.format(folder=tmp_path), encoding="utf-8")
    with started(engine, faults=tmp_path) as server:
        for pid in (server.process.pid, *server.engine_pids()):
            reported = tmp_path / str(pid)
            os.kill(pid, signal.SIGUSR1)
            wait_for(
                "the counts",
                lambda reported=reported: reported.exists() and reported.read_text().endswith("\n"),
            )
            frozen, looked_at = map(int, reported.read_text().split())
            assert frozen > 50_000
            assert looked_at < 20_000


@pytest.mark.slow
def test_a_server_whose_last_engine_is_given_up_ends(engine: Path, tmp_path: Path) -> None:
    """A rebuilt engine is not loaded in place of the one that died."""
    folder = shutil.copytree(engine, tmp_path / "engine")
    with started(folder) as server:
        (pid,) = server.engine_pids()
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text() + " ")
        os.kill(pid, signal.SIGKILL)
        assert server.process.wait(timeout=30) == 1
    last = "".join(server.lines)
    assert "every engine has died" in last
    assert "SIGKILL" in last
    assert "folder has changed" in last
    assert "Traceback" not in last
