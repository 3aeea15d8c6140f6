"""How a server and its engines end, and what clients see of it."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ingot.serve.long_prompts import LONG as LONG_TEXT
from tests.serve.client import Gate, Reply, Server, is_gone, launch, started, wait_for
from tests.serve.conftest import completion

COMPLETIONS = "/v1/completions"
LONG = {"max_tokens": 480, "ignore_eos": True}


def test_an_engine_dies_and_a_drain_has_a_deadline(engine: Path, tmp_path: Path) -> None:
    """Its open requests end by an error and no finish reason, new ones are refused until it is back; the
    other goes on. After SIGTERM and the time to drain, what is still open ends by an error, too, and the exit
    code is 0.
    """
    gate = Gate(tmp_path)
    words = ("--name", "a", "--name", "b", "--max-batch-size", 8, "--drain-seconds", 0.3)
    with started(engine, engine, *words, faults=tmp_path) as server, ThreadPoolExecutor(8) as pool:
        assert [one["id"] for one in server.get("/v1/models").json["data"]] == ["a", "b"]
        first, second = server.engine_pids()
        streams = [iter(server.stream(COMPLETIONS, completion(**LONG) | {"model": "a"})) for _ in range(3)]
        for stream in streams:
            next(stream)
        asked = {"model": "a", "input": "Tell me a story.", "ignore_eos": True}
        response = iter(server.stream("/v1/responses", asked))
        next(response)
        whole = pool.submit(server.post, COMPLETIONS, completion(**LONG) | {"model": "a"})
        wait_for("all to run", lambda: server.metric("ingot_num_requests_running", model_name="a") == 5)
        other = pool.submit(server.events, COMPLETIONS, completion(max_tokens=60) | {"model": "b"})
        wait_for("the other to run", lambda: server.metric("ingot_num_requests_running", model_name="b") == 1)
        gate.close()
        os.kill(first, signal.SIGKILL)
        for stream in streams:
            *chunks, last = stream
            assert set(last) == {"error"}
            assert last["error"]["code"] == "engine_dead"
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
        *_, last = response
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        assert (whole.result().status, whole.result().error["code"]) == (500, "engine_dead")
        assert other.result()[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        reply = server.post(COMPLETIONS, completion() | {"model": "a"})
        assert (reply.status, reply.error["code"]) == (503, "engine_dead")
        assert int(reply.headers["retry-after"]) >= 1
        wait_for("the end to be known", lambda: "SIGKILL" in server.get("/health").data.decode())
        assert server.get("/health").status == 503
        assert first not in server.engine_pids()
        assert server.post(COMPLETIONS, completion(max_tokens=1) | {"model": "b"}).status == 200
        assert server.metric("ingot_engine_alive", model_name="a") == 0
        assert server.metric("ingot_engine_alive", model_name="b") == 1
        gate.open()
        wait_for("the engine to be back", lambda: server.get("/health").status == 200)
        assert server.post(COMPLETIONS, completion(max_tokens=1) | {"model": "a"}).status == 200
        assert server.metric("ingot_engine_alive", model_name="a") == 1
        assert server.metric("ingot_engine_restarts_total", model_name="a") == 1
        assert "a: the engine's process was ended by SIGKILL" in "".join(server.lines)
        stream = iter(server.stream(COMPLETIONS, completion(**LONG, n=8) | {"model": "b"}))
        next(stream)
        server.process.terminate()
        *chunks, last = stream
        assert last["error"]["code"] == "server_stopping"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
        assert server.process.wait(timeout=30) == 0
        assert is_gone(second)
        assert "Traceback" not in "".join(server.lines)


def test_sigterm_lets_answers_end(engine: Path) -> None:
    """A full batch, a queue, and new clients: accepted requests get their complete answers, the others
    a refusal, and the exit code is 0.
    """
    values = {"max_tokens": 40, "ignore_eos": True}
    with started(engine, "--max-batch-size", 8) as server, ThreadPoolExecutor(48) as pool:
        whole = pool.submit(server.post, COMPLETIONS, completion(**values | {"max_tokens": 120}))
        wait_for("it to run", lambda: server.metric("ingot_num_requests_running") == 1)
        asked = [pool.submit(stream, server, values) for _ in range(24)]
        wait_for("a queue", lambda: server.metric("ingot_num_requests_waiting") > 8)
        coming = [pool.submit(keep_asking, server) for _ in range(8)]
        (engine_pid,) = server.engine_pids()
        server.process.terminate()
        os.kill(engine_pid, signal.SIGTERM)  # as a supervisor does that stops all of a service's processes
        wait_for("the port to be closed", lambda: not accepts(server))
        assert server.process.wait(timeout=60) == 0
        for one in asked:
            *chunks, last = one.result()
            assert last == "[DONE]"
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert whole.result().json["usage"]["completion_tokens"] == 120
        for two in coming:
            assert set(two.result()) <= {200, 503, None}
            assert two.result()[-1] is None
        assert is_gone(engine_pid)
        assert "Traceback" not in "".join(server.lines)


def test_a_second_interrupt_waits_for_no_thread(engine: Path) -> None:
    """Not for processes that hang, nor for those after them; clients learn that the server stops."""
    bodies = {
        "prompt_worker": [completion("a " * LONG_TEXT)] * 5,
        "grammar_probe": [completion(guided_regex="b" * i, max_tokens=1) for i in range(1, 6)],
    }
    others = [body for several in bodies.values() for body in several[2:]]
    words = ("--max-batch-size", 1, "--max-queue", len(others) - 1)
    with started(engine, *words) as server, ThreadPoolExecutor(len(others)) as pool:
        pids = list[int]()
        for worker, several in bodies.items():
            for body in several[:2]:  # so that each process has started
                server.post(COMPLETIONS, body)
            found = server.child_pids(worker.encode())
            assert found, worker
            pids += found
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        asked = [pool.submit(post_until_taken, server, body) for body in others]
        wait_for("a full queue", lambda: server.post(COMPLETIONS, completion(max_tokens=1)).status == 429)
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)  # two that come at once are one
        assert server.process.wait(timeout=30) == 130
        assert all(map(is_gone, pids))
        assert "Traceback" not in "".join(server.lines)
        for one in asked:
            reported = one.exception() or (one.result().status, one.result().error["code"])
            assert isinstance(reported, OSError) or reported == (503, "server_stopping")


def test_sigterm_while_engines_load(engine: Path) -> None:
    process, lines = launch(engine, "--port", 0)
    pids: list[int] = []
    server = Server(process, 0, lines)

    def loading() -> bool:
        pids.extend(server.engine_pids())
        return bool(pids)

    wait_for("an engine's process", loading)
    process.terminate()
    assert process.wait(timeout=30) == 0
    assert all(map(is_gone, pids))
    assert "Traceback" not in "".join(lines)


def post_until_taken(server: Server, body: dict[str, Any]) -> Reply:
    """The first answer that is not that the queue is full."""
    while (reply := server.post(COMPLETIONS, body)).status == 429:
        time.sleep(0.05)
    return reply


def accepts(server: Server) -> Any:
    """Whether a new connection is taken."""
    try:
        return server.get("/health").status
    except OSError:
        return None


def stream(server: Server, values: dict[str, Any]) -> list[Any]:
    return list(server.stream(COMPLETIONS, completion(**values)))


def keep_asking(server: Server) -> list[int | None]:
    """The statuses of requests one after another, until the port is closed (None)."""
    found: list[int | None] = []
    while not found or found[-1] is not None:
        try:
            found.append(server.post(COMPLETIONS, completion(max_tokens=2)).status)
        except OSError:
            found.append(None)
    return found
