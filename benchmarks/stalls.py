"""What one bad neighbour costs the other streams of a server.

63 streams decode, and a 64th client, in a process of its own, does one thing over and over: an ordinary
stream, a stream that it reads at one byte per second, a prompt that fills the context, a schema of 64 KB, a
conversation of 200 messages, a body of 5 MB that is refused, and, with ``--ears``, a minute of noise for a
second engine of the server to transcribe. Every case has a base beside it, with an
ordinary 64th stream, and its figure is the ratio of the two p99 inter-token latencies; the median over the
rounds counts, since machines are noisy. The last line is JSON.

A run of 96 tokens is some 80 steps, whose p99 is the slowest one: for a p99 that says more, and for prompts
that take longer than that, pass --new-tokens 2000 or more. Beside the ratios are the seconds until the
neighbour's answers began.

    python benchmarks/stalls.py engines/pocket-chat --json docs/results/stalls.json
    python benchmarks/stalls.py engines/7b --ears engines/whisper --cases recording
    python benchmarks/stalls.py --url http://127.0.0.1:8000 --model m --cases long,schema
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import platform
import random
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from neighbours import CASES, EARS, HEARD, Neighbour, post, tokens_of  # noqa: E402
from serve import start_server  # noqa: E402

MOST_PROMPT = 32768
Figures = dict[str, Any]


class Reader(asyncio.Protocol):
    """One stream: when its tokens came. It does as little as it can, so that 63 fit in one process."""

    def __init__(self, request: bytes, begun: Callable[[], None]) -> None:
        self.times: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._begun = request, begun

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.times and b"data: " in data:
            self._begun()
        self.times += [now] * data.count(b'"choices":[{')

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def one_run(host: str, port: int, requests: list[bytes], neighbour: Neighbour) -> Figures:
    """Milliseconds between two tokens of each ordinary stream, from when all of them have begun and the
    neighbour has been let go."""
    loop = asyncio.get_running_loop()
    waiting, all_begun = len(requests), asyncio.Event()

    def begun() -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting:
            all_begun.set()

    readers = [
        (await loop.create_connection(lambda r=request: Reader(r, begun), host, port))[1]
        for request in requests
    ]
    await all_begun.wait()
    with neighbour.let_go() as since:
        await asyncio.gather(*(reader.ended for reader in readers))
        until = min(reader.times[-1] for reader in readers)
    statuses, waited = neighbour.statuses()
    gaps = [
        1e3 * (after - before)
        for reader in readers
        for before, after in pairwise(reader.times)
        if since <= before and after <= until
    ]
    if not gaps:
        raise SystemExit("the first stream ended before the last began: raise --new-tokens")
    return {
        "p50_ms": percentile(gaps, 50),
        "p99_ms": percentile(gaps, 99),
        "max_ms": round(max(gaps), 2),
        "gaps": len(gaps),
        "neighbour": statuses,
        "neighbour_s": waited,
    }


def percentile(values: list[float], percent: int) -> float:
    """Of the sorted values, the one at this share of them."""
    return round(sorted(values)[min(len(values) - 1, len(values) * percent // 100)], 2)


def measure(
    address: tuple[str, int], model: str, cases: list[str], streams: int, new_tokens: int, rounds: int
) -> dict[str, list[dict[str, Figures]]]:
    """Of each case, in every round, its figures and those of the base that ran before it."""
    host, port = address
    limit = tokens_of(host, port, model, "a")[1]
    longest = min(limit, MOST_PROMPT)
    values = {"model": model, "max_tokens": new_tokens, "ignore_eos": True, "stream": True}
    requests = [
        post("/v1/completions", {**values, "prompt": f"Story {i}: a fire broke out in a"})
        for i in range(streams - 1)
    ]
    found: dict[str, list[dict[str, Figures]]] = {case: [] for case in cases}
    random.seed(0)
    for number in range(-1, rounds):  # the first warms up
        for case in cases if number >= 0 else cases[:1]:
            both = {}
            for kind in ("ordinary", case):
                with Neighbour(kind, host, port, model, longest, random.randrange(1 << 30)) as neighbour:
                    both["base" if kind == "ordinary" else "case"] = asyncio.run(
                        one_run(host, port, requests, neighbour)
                    )
                wait_until_idle(host, port)
            if number >= 0:
                found[case].append(both)
                print(case, number, json.dumps(both), file=sys.stderr, flush=True)
    return found


def wait_until_idle(host: str, port: int) -> None:
    """Until the server has no request left."""
    while True:
        text = asyncio.run(
            answer_of(host, port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        )
        names = (b"ingot_num_requests_running{", b"ingot_num_requests_waiting{")
        if all(line.endswith(b" 0.0") for line in text.splitlines() if line.startswith(names)):
            return
        time.sleep(0.05)


async def answer_of(host: str, port: int, request: bytes) -> bytes:
    """Everything that comes back for a request."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    data = await reader.read()
    writer.close()
    return data


def summary(runs: list[dict[str, Figures]]) -> Figures:
    """The ratios of a case, and what the neighbour received."""
    ratios = {
        name: sorted(round(both["case"][f"{name}_ms"] / both["base"][f"{name}_ms"], 3) for both in runs)
        for name in ("p50", "p99", "max")
    }
    statuses: Counter[str] = Counter()
    for both in runs:
        statuses.update(both["case"]["neighbour"])
    waited = [seconds for both in runs for seconds in both["case"]["neighbour_s"]]
    return {
        "p99_ratio": statistics.median(ratios["p99"]),
        "p50_ratio": statistics.median(ratios["p50"]),
        "max_ratio": statistics.median(ratios["max"]),
        "base_p99_ms": statistics.median(both["base"]["p99_ms"] for both in runs),
        "case_p99_ms": statistics.median(both["case"]["p99_ms"] for both in runs),
        "p99_ratios": ratios["p99"],
        "statuses": dict(statuses),
        "neighbour_s": statistics.median(waited) if waited else None,
    }


@contextlib.contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[tuple[str, int], str]]:
    """Address and model of the server: of one that runs, or of one that is started."""
    if args.url:
        parts = urlsplit(args.url)
        yield (parts.hostname or "127.0.0.1", parts.port or 80), args.model
        return
    more = [] if args.ears is None else [args.ears, "--name", EARS]
    server, port = start_server(args.engine, args.threads, [*more, *args.serve.split()])
    try:
        yield ("127.0.0.1", port), "m"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", nargs="?", help="an engine of a batch of at least --streams")
    parser.add_argument("--ears", help="a speech engine, served beside it")
    parser.add_argument("--url", help=f"a server that runs already; a speech model is named {EARS}")
    parser.add_argument("--model", default="m", help="its model")
    parser.add_argument("--streams", type=int, default=64, help="the neighbour among them")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="PyTorch's, of the executor")
    parser.add_argument("--cases", help="by default all, recordings with --ears")
    parser.add_argument("--label", default="as is", help="name of this run in the record")
    parser.add_argument("--json", type=Path, help="results are added to this file, by label")
    parser.add_argument("--serve", default="", help="more flags of `ingot serve`, in one word")
    args = parser.parse_args()
    if (args.engine is None) == (args.url is None):
        parser.error("give an engine or --url")
    known = CASES if args.ears is None and args.url is None else CASES + HEARD
    cases = args.cases.split(",") if args.cases else [*(CASES if args.ears is None else known)]
    if not set(cases) <= set(known):
        parser.error(f"--cases takes {', '.join(known)}; {', '.join(HEARD)} needs --ears")
    with served(args) as (address, model):
        found = measure(address, model, cases, args.streams, args.new_tokens, args.rounds)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": multiprocessing.cpu_count()},
        "streams": args.streams,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "cases": {case: summary(runs) for case, runs in found.items()},
        "runs": found,
    }
    for case, one in record["cases"].items():
        spread = f"({one['p99_ratios'][0]:.2f} to {one['p99_ratios'][-1]:.2f})"
        times = f"p99 {one['base_p99_ms']:7.1f} → {one['case_p99_ms']:7.1f} ms"
        waited = f", its own answers after {one['neighbour_s']:.1f} s" if one["neighbour_s"] else ""
        print(f"{case:<12} {times}, {one['p99_ratio']:.2f}x {spread}  {one['statuses']}{waited}")
    if args.json:
        records = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps(records | {args.label: record}, indent=1) + "\n")
    print(json.dumps({args.label: {**record, "runs": None}}))


if __name__ == "__main__":
    main()
