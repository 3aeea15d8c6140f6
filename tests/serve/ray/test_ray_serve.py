"""Two replicas of the pocket engine behind Ray Serve, and a second engine with a small queue."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ingot import build
from tests.serve.client import JSON, ROOT, Stream, wait_for
from tests.serve.ray.served import RayServer, ray_served, wait_long

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BATCH, QUEUE, PREFIX, BLOCK = 8, 8, 512, 64
LONG = {"max_tokens": 1800, "ignore_eos": True}
TALE = {"max_tokens": 1500, "ignore_eos": True}
ENGINE = {"threads": 1, "max_batch_size": BATCH, "runtime": {"cache_tokens": 24576}}
FACTS_SECONDS = 2.0  # figures are told every second
LITTLE_CPU = {"num_cpus": 0.1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    folder = tmp_path_factory.mktemp("ray")
    engine = build(ROOT / "models" / "pocket-chat", folder / "pocket", device="cpu", max_seq_len=2048)
    engines = [{"path": str(engine), **ENGINE}, {"path": str(engine), "name": "tight", **ENGINE}]
    deployments = [
        {"name": "pocket", "num_replicas": 2, "ray_actor_options": LITTLE_CPU},
        {
            "name": "tight",
            "num_replicas": 1,
            "max_ongoing_requests": 1,
            "max_queued_requests": 1,
            "ray_actor_options": LITTLE_CPU,
        },
    ]
    application = {
        "name": "ingot",
        "route_prefix": "/",
        "import_path": "ingot.adapters.ray.application:build",
        "args": {"engines": engines, "max_queue": QUEUE},
        "deployments": deployments,
    }
    with ray_served({"applications": [application]}, folder, key="sesame") as found:
        yield found


def completion(
    prompt: object = "A fire broke out in a", model: str = "pocket", **values: Any
) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, **values}


def running(server: RayServer, model: str = "pocket") -> dict[str, float]:
    return server.per_replica("ingot_num_requests_running", model_name=model)


def is_idle(server: RayServer) -> bool:
    return server.metric("ingot_num_requests_running") + server.metric("ingot_num_requests_waiting") == 0


def test_what_is_known_of_all(server: RayServer) -> None:
    assert server.get("/health").json == {"status": "ok"}
    assert [one["id"] for one in server.get("/v1/models").json["data"]] == ["pocket", "tight"]
    assert server.get("/v1/models/tight").json["id"] == "tight"
    assert len(running(server)) == 2
    assert len(running(server, "tight")) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (COMPLETIONS, {"model": "none", "prompt": "A"}, 404, "model_not_found"),
        (COMPLETIONS, b'{"model": "pocket", ', 400, "invalid_json"),
        (COMPLETIONS, {"prompt": "A"}, 400, None),
        (COMPLETIONS, completion("A " * 4000), 400, "context_length_exceeded"),
        ("/v1/none", completion(), 404, None),
    ],
)
def test_refusals_are_our_own(server: RayServer, path: str, body: Any, status: int, code: str | None) -> None:
    reply = server.post(path, body)
    assert (reply.status, reply.error["code"]) == (status, code)


def test_a_key_is_asked_for(server: RayServer) -> None:
    for method, path in (("GET", "/metrics"), ("POST", COMPLETIONS)):
        reply = server.request(method, path, completion(), JSON)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert server.request("GET", "/health", None, {}).status == 200


def test_a_stream_comes_piece_by_piece(server: RayServer) -> None:
    body = completion(**LONG)  # several seconds: figures are a second old
    events = iter(server.stream(COMPLETIONS, body))
    first = next(events)
    wait_for("the figures to show it", lambda: sum(running(server).values()) == 1)  # it has not ended
    chunks = [first, *events]
    assert chunks.pop() == "[DONE]"
    assert len(chunks) > 50
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == server.post(COMPLETIONS, body).json["choices"][0]["text"]
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_place(server: RayServer, stream: bool) -> None:
    before = server.metric("ingot_generation_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        if stream:
            left = server.stream(COMPLETIONS, completion(**LONG))
            next(iter(left))
        else:
            asked = pool.submit(impatient, server, completion(**LONG))
        wait_for("it to run", lambda: sum(running(server).values()) == 1)
        if stream:
            left.close()
        else:
            with pytest.raises(TimeoutError):
                asked.result()
    wait_for("its place to be free", lambda: is_idle(server))
    assert 0 < server.metric("ingot_generation_tokens_total") - before < LONG["max_tokens"] / 2


def impatient(server: RayServer, body: dict[str, Any]) -> None:
    """Ask, and leave when the figures have shown it and a part of ``LONG`` is done."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=FACTS_SECONDS)
    headers = {**JSON, **server.headers}
    connection.request("POST", COMPLETIONS, json.dumps(body), headers)
    try:
        connection.getresponse()
    finally:
        connection.close()


def test_full_queues_are_a_503_of_ours(server: RayServer) -> None:
    runs = server.stream(COMPLETIONS, completion(model="tight", **LONG))
    next(iter(runs))
    with ThreadPoolExecutor(1) as pool, closing(runs):
        waits = pool.submit(server.post, COMPLETIONS, completion(model="tight", max_tokens=1))
        time.sleep(1.0)  # until it waits
        reply = server.post(COMPLETIONS, completion(model="tight", max_tokens=1))
        assert (reply.status, reply.error["code"]) == (503, "queue_full")
        assert reply.headers["retry-after"] == "1"
        assert server.post(COMPLETIONS, completion(max_tokens=1)).status == 200  # the other engine has room
        runs.close()
        assert waits.result().status == 200


def test_a_full_engine_is_a_429_of_the_engine(server: RayServer) -> None:
    body = completion(n=BATCH, temperature=1.0, **LONG)
    runs = server.stream(COMPLETIONS, body)
    with ThreadPoolExecutor(1) as pool, closing(runs):
        waits = pool.submit(server.stream, COMPLETIONS, body)  # an equal prompt, so the same replica
        wait_for("it to wait", lambda: server.metric("ingot_num_requests_waiting") == QUEUE)
        reply = server.post(COMPLETIONS, body)
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        runs.close()
        waits.result().close()
    wait_for("their places to be free", lambda: is_idle(server))


def test_prompts_go_where_their_prefix_is_cached(server: RayServer) -> None:
    numbers = random.Random(5)
    prefixes = [[numbers.randrange(300, 2000) for _ in range(PREFIX)] for _ in range(10)]
    order = [position % 10 for position in range(200)]
    numbers.shuffle(order)
    names = ("ingot_prefix_cache_queries_total", "ingot_prefix_cache_hits_total")
    time.sleep(FACTS_SECONDS)
    before = [server.per_replica(name, model_name="pocket") for name in names]

    def ask(position: int) -> int:
        suffix = [numbers.randrange(300, 2000) for _ in range(40)]
        return server.post(COMPLETIONS, completion(prefixes[position] + suffix, max_tokens=2)).status

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, order)) == {200}
    time.sleep(FACTS_SECONDS)
    after = [server.per_replica(name, model_name="pocket") for name in names]
    queries, hits = ({r: a[r] - b[r] for r in a} for a, b in zip(after, before, strict=True))
    assert sum(queries.values()) == 200 * (PREFIX + 40)
    assert sum(hits.values()) / PREFIX >= 0.9 * 200  # a request finds all of its prefix, or nothing
    assert min(queries.values()) > 0


@pytest.mark.parametrize("who", [b"engine_process", b"ServeReplica:ingot:pocket"])
def test_a_replica_dies_with_its_own_requests_alone(server: RayServer, who: bytes) -> None:
    streams = spread(server)
    before = running(server)
    os.kill(server.pids(who)[0] if who != b"engine_process" else pocket_engine(server), signal.SIGKILL)
    for position in range(20):  # those that come now are not lost
        reply = server.post(COMPLETIONS, completion(f"Story {position}: a fire", max_tokens=2))
        assert reply.status == 200, reply.data
    ends = [list(stream)[-1] for stream in streams]
    failed = [end for end in ends if end != "[DONE]"]
    assert {end["error"]["code"] for end in failed} == {"engine_dead"}
    wait_long("another replica", lambda: len(running(server).keys() - before.keys()) == 1, server.lines)
    wait_for("the lost one to be forgotten", lambda: len(running(server)) == 2)
    (lost,) = before.keys() - running(server).keys()
    assert len(failed) == before[lost] < len(streams)
    assert server.get("/health").status == 200


def pocket_engine(server: RayServer) -> int:
    """The engine's process of one of the two replicas."""
    parents = server.pids(b"ServeReplica:ingot:pocket")
    stats = {pid: Path(f"/proc/{pid}/stat").read_text() for pid in server.pids(b"engine_process")}
    return next(pid for pid, stat in stats.items() if int(stat.rpartition(")")[2].split()[1]) in parents)


def spread(server: RayServer) -> list[Stream]:
    """Streams that have begun, some on each of two replicas."""
    streams: list[Stream] = []
    while len(streams) < BATCH:
        streams.append(server.stream(COMPLETIONS, completion(f"Tale {len(streams)}: the sea", **TALE)))
        next(iter(streams[-1]))
    wait_for("the figures to show all", lambda: sum(running(server).values()) == len(streams))
    assert min(running(server).values()) > 0
    return streams
