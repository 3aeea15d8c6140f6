"""What ``ingot bench serving`` adds to the times of a server whose pace is known.

A stub in a process of its own streams 64 answers at 100 tokens/s each and notes when it sends every token.
Processes of one machine share the clock on Linux, so the client's times are compared with the stub's, token
by token. The stub's own unsteadiness is in both.

    python benchmarks/client_overhead.py --json docs/results/client_overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from ingot.measure.bench.serving.http_answer import HttpAnswer
from ingot.measure.bench.serving.load_client import opened
from ingot.measure.bench.serving.server_target import ServerPrompt, ServerTarget
from ingot.measure.side.machine import machine
from ingot.measure.side.timed_run import spread_with_mean

FIRST_MS, PROMPT = 50.0, 512


@contextmanager
def stub(gap_ms: float) -> Iterator[str]:
    words = [sys.executable, "-m", "tests.measure.bench.stub_server", "--first-ms", str(FIRST_MS)]
    with subprocess.Popen([*words, "--gap-ms", str(gap_ms)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def stream(url: str, streams: int, tokens: int) -> tuple[list[HttpAnswer], float]:
    """The answers of ``streams`` requests at once, and the client's share of a core."""
    target = ServerTarget(url, "stub")
    bodies = [target.body("stub", ServerPrompt([number] * PROMPT, tokens)) for number in range(streams)]
    async with opened(target) as client:
        start, cpu = time.perf_counter(), time.process_time()
        answers = await asyncio.gather(*(client.send(body, start) for body in bodies))
        share = (time.process_time() - cpu) / (time.perf_counter() - start)
    return answers, share


def compare(answers: list[HttpAnswer], sent: list[list[float]]) -> dict[str, Any]:
    """Client beside stub, both in the same order; ``delay_ms`` is from the stub's note to the client's."""
    delays = []
    for answer, times in zip(answers, sent, strict=True):
        arrivals = accumulate(answer.gaps_s, initial=answer.sent + answer.ttft_s)
        delays += [seen - noted for seen, noted in zip(arrivals, times, strict=True)]
    seen = [gap for answer in answers for gap in answer.gaps_s]
    noted = [after - before for times in sent for before, after in pairwise(times)]
    return {
        "itl_ms": spread_with_mean(seen, 1e3),
        "stub_itl_ms": spread_with_mean(noted, 1e3),
        "delay_ms": spread_with_mean(delays, 1e3),
        "tpot_ms": spread_with_mean([a.tpot_s for a in answers if a.tpot_s is not None], 1e3),
    }


def least_most(values: Iterable[float]) -> list[float]:
    """Over all rounds."""
    found = list(values)
    return [min(found), max(found)]


def measured(streams: int, tokens: int, gap_ms: float) -> dict[str, Any]:
    """One round, with a stub of its own."""
    with stub(gap_ms) as url:
        answers, share = asyncio.run(stream(url, streams, tokens))
        failed = [answer.message for answer in answers if answer.error is not None]
        assert not failed, failed
        with urllib.request.urlopen(f"{url}/sent") as response:
            sent = {prompt[0]: times for prompt, times in json.load(response)}
    times = [sent[number] for number in range(streams)]
    return {"client_cpu": round(share, 3), **compare(answers, times)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    rounds = [measured(asked.streams, asked.tokens, asked.gap_ms) for _ in range(asked.rounds)]
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(torch.device("cpu")),
        "streams": asked.streams,
        "tokens": asked.tokens,
        "nominal_itl_ms": asked.gap_ms,
        "load_average": least_most([before, os.getloadavg()[0]]),
        "rounds": rounds,
        "mean_itl_ms": least_most(r["itl_ms"]["mean"] for r in rounds),
        "median_itl_ms": least_most(r["itl_ms"]["p50"] for r in rounds),
        "stub_median_itl_ms": least_most(r["stub_itl_ms"]["p50"] for r in rounds),
        "median_delay_ms": least_most(r["delay_ms"]["p50"] for r in rounds),
        "p99_delay_ms": least_most(r["delay_ms"]["p99"] for r in rounds),
        "client_cpu": least_most(r["client_cpu"] for r in rounds),
    }
    if asked.json is not None:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
