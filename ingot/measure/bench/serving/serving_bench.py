"""A server under load: how long requests wait, and tokens per second."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ingot.errors import DeviceError, to_install
from ingot.measure.bench.serving.http_answer import HttpAnswer, StreamError
from ingot.measure.bench.serving.server_target import ServerTarget
from ingot.measure.bench.serving.serving_figures import serving_doubts, serving_entry
from ingot.measure.bench.serving.serving_load import Point, Prompts, arrivals
from ingot.measure.side.machine import machine
from ingot.measure.side.open_side import Say, silent
from ingot.measure.side.token_load import check_counts

if TYPE_CHECKING:
    from ingot.measure.bench.serving.load_client import Client

SCHEMA = 1
METHOD = "greedy, streamed, times seen by the client; failed requests have no part in the figures"
Record = dict[str, Any]


@dataclass(frozen=True)
class ServingBench:
    """What is measured.

    Attributes:
        points: loads, one after another.
        requests: of each point.
        warm_up: requests that are sent at once before the first point, and not counted.
        seed: of arrival times.
        limits_ms: maximum ``ttft``, ``tpot`` and ``e2e`` of a good request.
    """

    target: ServerTarget
    prompts: Prompts
    points: tuple[Point, ...]
    requests: int = 100
    warm_up: int = 1
    seed: int = 0
    limits_ms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_counts(requests=self.requests, warm_up=self.warm_up)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.target.to_json(),
            **self.prompts.to_json(),
            "points": [point.to_json() for point in self.points],
            "requests": self.requests,
            "warm_up": self.warm_up,
            "arrival_seed": self.seed,
            "limits_ms": self.limits_ms,
        }


def check_client() -> None:
    """Raise a ``DeviceError`` if aiohttp is not installed."""
    if importlib.util.find_spec("aiohttp") is None:
        raise DeviceError("aiohttp is not installed, and bench serving needs it", fix=to_install("bench"))


def bench_serving(wanted: ServingBench, *, command: str = "", say: Say | None = None) -> Record:
    """The record of a server at each point.

    Raises:
        DeviceError: aiohttp is not installed.
        ConfigError: no server answers, it refuses the key, or it lacks the model.
        RequestError: a first request fails.
    """
    check_client()
    record = {"schema": SCHEMA, "verb": "serving", "command": command, "method": METHOD}
    record |= {"machine": machine(torch.device("cpu")), "wanted": wanted.to_json()}
    return record | asyncio.run(_measure(wanted, say or silent))


async def _measure(wanted: ServingBench, say: Say) -> Record:
    from ingot.measure.bench.serving.load_client import opened

    async with opened(wanted.target) as client:
        say("asking for the model")
        model = await client.model()
        say("warming up")
        bodies = [wanted.target.body(model, prompt) for prompt in wanted.prompts.take(wanted.warm_up)]
        for answer in await _load(client, bodies, [0.0] * wanted.warm_up):
            if answer.error is not None:
                client.refuse(StreamError(answer.error, answer.message))
        results = []
        for point in wanted.points:
            say(f"{point.name}, {wanted.requests} requests")
            prompts = wanted.prompts.take(wanted.requests)
            bodies = [wanted.target.body(model, prompt) for prompt in prompts]
            start, cpu = time.perf_counter(), time.process_time()
            if point.concurrency is not None:
                answers = await _closed(client, bodies, point.concurrency)
            else:
                assert point.rate is not None, "a point without a load"
                answers = await _load(client, bodies, arrivals(wanted.requests, point.rate, wanted.seed))
            seconds = time.perf_counter() - start
            client_cpu = round((time.process_time() - cpu) / seconds, 3)
            asked = [prompt.new_tokens for prompt in prompts]
            figures = serving_entry(answers, asked, seconds, wanted.limits_ms)
            raw = [answer.to_json(start) for answer in answers]
            results.append(point.to_json() | figures | {"client_cpu": client_cpu, "raw": raw})
    doubts = [f"{entry['load']}: {line}" for entry in results for line in serving_doubts(entry)]
    taken, count = wanted.warm_up + wanted.requests * len(wanted.points), wanted.prompts.count
    if count is not None and taken > count:
        doubts.append(f"{count} prompts for {taken} requests: prompts repeat, and a prefix cache knows them")
    return {"server": client.facts, "results": results, "doubts": doubts}


async def _load(client: Client, bodies: Sequence[bytes], times: Sequence[float]) -> list[HttpAnswer]:
    """Open loop: each request at its time, whether those before have ended or not."""
    start = time.perf_counter()

    async def send(body: bytes, due: float) -> HttpAnswer:
        await asyncio.sleep(due - time.perf_counter())
        return await client.send(body, due)

    pairs = zip(bodies, times, strict=True)
    return list(await asyncio.gather(*(send(body, start + due) for body, due in pairs)))


async def _closed(client: Client, bodies: Sequence[bytes], concurrency: int) -> list[HttpAnswer]:
    """Closed loop: a request begins when another ends."""
    answers: dict[int, HttpAnswer] = {}
    waiting = enumerate(bodies)

    async def worker() -> None:
        for place, body in waiting:
            answers[place] = await client.send(body, time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return [answers[place] for place in range(len(bodies))]
