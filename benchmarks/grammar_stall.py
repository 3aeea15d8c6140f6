"""What a large schema does to the other streams of a server.

Streams run at full speed while requests come in one after another: none, some with a grammar that compiles
at once, as many with a schema of 64 KB that no other had. Of each case the gaps between the chunks of a
stream, and how long such a request took to its first and only token. The last line is JSON.

    python benchmarks/grammar_stall.py engines/pocket-chat --json docs/results/grammar_stall.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.serve import start_server  # noqa: E402
from ingot.device import resolve_device  # noqa: E402
from ingot.measure.side.machine import machine  # noqa: E402


def schema(kind: str, place: int) -> dict[str, Any]:
    """A schema that no other request has; a large one is nested, as those of real APIs are."""
    if kind == "small":
        return {"const": place}
    parts = {}
    for i in range(38):
        fields = {f"field_{place}_{i}_{k}": {"type": ["integer", "null"]} for k in range(38)}
        parts[f"part_{i}"] = {"type": "object", "properties": fields, "additionalProperties": False}
    return {"type": "object", "properties": parts}


async def ask(port: int, values: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request on a connection of its own."""
    body = json.dumps({"model": "m", "prompt": "A fire broke out in a", **values}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Connection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return reader, writer


async def gaps(port: int, new_tokens: int) -> list[float]:
    """Seconds between the chunks of one stream."""
    reader, writer = await ask(port, {"max_tokens": new_tokens, "ignore_eos": True, "stream": True})
    times = []
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    return [after - before for before, after in itertools.pairwise(times)]


async def held(port: int, kind: str, place: int) -> float:
    """Seconds that one request with a grammar takes to its first token, which is its last."""
    start = time.perf_counter()
    reader, writer = await ask(port, {"max_tokens": 1, "guided_json": schema(kind, place)})
    data = await reader.read()
    writer.close()
    if b"200 OK" not in data[:20]:
        raise SystemExit(data.decode())
    return time.perf_counter() - start


async def run(port: int, kind: str, first: int, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """The streams' gaps beside requests of one kind, and what these took."""
    streams = [asyncio.create_task(gaps(port, args.new_tokens)) for _ in range(args.streams)]
    await asyncio.sleep(0.5)
    took = [] if kind == "none" else [await held(port, kind, first + i) for i in range(args.requests)]
    found = await asyncio.gather(*streams)
    return [gap for stream in found for gap in stream], took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=3, help="with a grammar, during each run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    server, port = start_server(args.engine, 1)
    all_gaps: dict[str, list[float]] = {"none": [], "small": [], "large": []}
    all_took: dict[str, list[float]] = {kind: [] for kind in all_gaps}
    try:
        asyncio.run(run(port, "small", 10**6, args))
        for i in range(args.runs):
            for kind in all_gaps:
                found, took = asyncio.run(run(port, kind, i * args.requests, args))
                all_gaps[kind] += found
                all_took[kind] += took
    finally:
        server.terminate()
        server.wait()
    cases = {}
    for kind, found in all_gaps.items():
        order, took = sorted(found), sorted(all_took[kind])
        milliseconds = {f"p{p}": order[len(order) * p // 100] * 1e3 for p in (50, 99)}
        cases[kind] = {**milliseconds, "max": order[-1] * 1e3}
        if took:
            cases[kind] |= {"request_p50": took[len(took) // 2] * 1e3, "request_max": took[-1] * 1e3}
        print(f"{kind:<6}", "  ".join(f"{name} {value:.1f} ms" for name, value in cases[kind].items()))
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(resolve_device("auto")),
        "schema_bytes": len(json.dumps(schema("large", 0), separators=(",", ":"))),
        "streams": args.streams,
        "new_tokens": args.new_tokens,
        "gap_ms": cases,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
