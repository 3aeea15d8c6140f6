"""How many requests find their prefix cached behind Ray Serve, and what a killed replica costs.

Requests over prefixes of random tokens are sent in random order to replicas of an engine: by Ingot's router,
then by Ray's own. A request finds its whole prefix or nothing, so hits in tokens count requests. Under
Ingot's, streams are then opened on all replicas, and one engine's process is killed. The last line is JSON.

    python benchmarks/ray_prefixes.py engines/pocket-chat --json docs/results/ray.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ingot.measure.side.machine import machine
from tests.serve.client import Stream, wait_for
from tests.serve.ray.served import RayServer, ray_served, wait_long

COMPLETIONS = "/v1/completions"
SUFFIX = 40  # tokens of each request that no other has
FACTS_SECONDS = 2.0  # a replica reports its figures every second
RAYS_OWN = "ray.serve._private.request_router.pow_2_router:PowerOfTwoChoicesRequestRouter"
STREAM = {"max_tokens": 400, "ignore_eos": True}


def configuration(args: argparse.Namespace, router: str | None) -> dict[str, Any]:
    """The YAML's content; ``router``: another than Ingot's."""
    deployment: dict[str, Any] = {"name": "m", "num_replicas": args.replicas}
    deployment["ray_actor_options"] = {"num_cpus": 0.1}
    if router is not None:
        deployment["request_router_config"] = {"request_router_class": router}
    engine = {"path": str(args.engine.resolve()), "name": "m", "threads": 1, "unproven": True}
    application = {"name": "ingot", "route_prefix": "/", "args": {"engines": [engine]}}
    application |= {"import_path": "ingot.adapters.ray.application:build", "deployments": [deployment]}
    return {"applications": [application]}


def cached(server: RayServer, args: argparse.Namespace) -> dict[str, Any]:
    """Send the requests; returns what was found in the caches."""
    numbers = random.Random(args.seed)
    draw = lambda count: [numbers.randrange(300, 2000) for _ in range(count)]  # noqa: E731
    prefixes = [draw(args.prefix) for _ in range(args.prefixes)]
    order = [position % args.prefixes for position in range(args.requests)]
    numbers.shuffle(order)
    bodies = [{"model": "m", "prompt": prefixes[i] + draw(SUFFIX), "max_tokens": 4} for i in order]
    start = time.perf_counter()
    with ThreadPoolExecutor(args.concurrency) as pool:
        statuses = list(pool.map(lambda body: server.post(COMPLETIONS, body).status, bodies))
    seconds = time.perf_counter() - start
    assert set(statuses) == {200}, statuses
    time.sleep(FACTS_SECONDS)
    queries = server.per_replica("ingot_prefix_cache_queries_total")
    hits = server.per_replica("ingot_prefix_cache_hits_total")
    found = sum(hits.values()) / args.prefix
    return {
        "requests_that_hit": found,
        "percent": 100 * found / args.requests,
        "hit_tokens": sum(hits.values()),
        "queried_tokens": sum(queries.values()),
        "requests_per_replica": [tokens / (args.prefix + SUFFIX) for tokens in queries.values()],
        "seconds": seconds,
    }


def killed(server: RayServer, args: argparse.Namespace) -> dict[str, Any]:
    """Kill the engine of a replica under streams; returns who failed and how long the next replica took."""
    streams = opened(server, args)
    wait_for("the figures to show all", lambda: sum(running(server).values()) == len(streams))
    before = running(server)
    os.kill(server.pids(b"engine_process")[0], signal.SIGKILL)
    start = time.perf_counter()
    body = {"model": "m", "prompt": "A fire", "max_tokens": 2}
    later = [server.post(COMPLETIONS, {**body, "prompt": f"Story {i}"}).status for i in range(20)]
    failed = sum(list(stream)[-1] != "[DONE]" for stream in streams)
    wait_long("a new replica", lambda: running(server).keys() - before.keys(), server.lines)
    seconds = time.perf_counter() - start
    wait_for("the lost one to be forgotten", lambda: len(running(server)) == args.replicas)
    (lost,) = before.keys() - running(server).keys()
    return {
        "streams": len(streams),
        "streams_of_the_killed": before[lost],
        "streams_failed": failed,
        "requests_right_after": len(later),
        "of_these_failed": sum(status != 200 for status in later),
        "seconds_to_the_next_replica": seconds,
    }


def opened(server: RayServer, args: argparse.Namespace) -> list[Stream]:
    """Streams that have begun, at least three for each replica and some on each."""
    streams: list[Stream] = []
    while len(streams) < 3 * args.replicas or min(running(server).values()) == 0:
        body = {"model": "m", "prompt": f"Tale {len(streams)}: the sea", **STREAM}
        streams.append(server.stream(COMPLETIONS, body))
        next(iter(streams[-1]))
    return streams


def running(server: RayServer) -> dict[str, float]:
    return server.per_replica("ingot_num_requests_running")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prefixes", type=int, default=10)
    parser.add_argument("--prefix", type=int, default=512, help="tokens, whole blocks of 64")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(torch.device("cpu")),
        "ray": ray.__version__,
        **{name: value for name, value in vars(args).items() if isinstance(value, int)},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, router in (("prefix_router", None), ("rays_own", RAYS_OWN)):
            with ray_served(configuration(args, router), Path(folder)) as server:
                result[name] = cached(server, args)
                print(name, f"{result[name]['percent']:.1f} % of requests hit")
                if router is None:
                    result["killed"] = killed(server, args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
