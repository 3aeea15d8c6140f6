"""Streams for minutes: is every character there, and does memory stay flat?

So many clients stream at once, one request after another, each of a fixed list of prompts; every answer must
equal the answer that its prompt had alone. Memory (RSS) of the server and of its engine is read every second,
and its slope over the second half must stay below the limit. Ends with 1 if an answer differs or memory
grows. The last line is JSON.

    python benchmarks/soak.py engines/pocket-chat --seconds 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from neighbours import COMPLETIONS, post  # noqa: E402
from serve import start_server  # noqa: E402

PROMPTS = 16


async def streamed(port: int, request: bytes) -> str:
    """The text of a stream that ended as it should; else what came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    lines = (await reader.read()).split(b"\n")
    writer.close()
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return f"broken off: {lines[-3:]!r}"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def requests(new_tokens: int) -> list[bytes]:
    """Prompts whose answers differ in length and need characters of several bytes, half of them sampled."""
    values = {"model": "m", "stream": True, "repetition_penalty": 1.1}
    return [
        post(
            COMPLETIONS,
            {
                **values,
                "prompt": f"Story {i}: 你好 a fire broke out in a",
                "max_tokens": new_tokens + 7 * i,
                "temperature": 1.0 if i % 2 else 0.0,
                "seed": i,
            },
        )
        for i in range(PROMPTS)
    ]


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def children(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    found = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(one for child in found for one in children(child))]


async def soak(port: int, pid: int, streams: int, seconds: float, new_tokens: int) -> dict[str, Any]:
    """Answers that came, those that differ, and memory by second of each process."""
    asked = requests(new_tokens)
    alone = [await streamed(port, request) for request in asked]
    end, count, wrong = time.monotonic() + seconds, 0, []
    memory: dict[int, list[float]] = {process: [] for process in children(pid)}

    async def client(first: int) -> None:
        nonlocal count
        position = first
        while time.monotonic() < end:
            text = await streamed(port, asked[position % PROMPTS])
            count += 1
            if text != alone[position % PROMPTS]:
                wrong.append({"expected": alone[position % PROMPTS], "came": text})
            position += 1

    async def watch() -> None:
        while time.monotonic() < end:
            for process, values in memory.items():
                values.append(round(rss_mib(process), 2))
            await asyncio.sleep(1.0)

    await asyncio.gather(watch(), *(client(i) for i in range(streams)))
    return {"answers": count, "characters": sum(map(len, alone)), "wrong": wrong, "rss_mib": memory}


def mib_per_minute(values: list[float]) -> float:
    """The slope over the second half: the first fills caches."""
    late = values[len(values) // 2 :]
    if len(late) < 2:
        return 0.0
    return round(60 * statistics.linear_regression(range(len(late)), late).slope, 3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=2.0, help="MiB per minute that a process may grow")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    server, port = start_server(args.engine, args.threads)
    try:
        found = asyncio.run(soak(port, server.pid, args.streams, args.seconds, args.new_tokens))
    finally:
        server.terminate()
        server.wait()
    slopes = {str(process): mib_per_minute(values) for process, values in found["rss_mib"].items()}
    grows = [slope for slope in slopes.values() if slope > args.limit]
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": platform.machine(),
        **{name: getattr(args, name) for name in ("streams", "seconds", "new_tokens", "limit")},
        "answers": found["answers"],
        "wrong": len(found["wrong"]),
        "examples": found["wrong"][:3],
        "mib_per_minute": sorted(slopes.values()),
        "rss_mib": list(found["rss_mib"].values()),
    }
    print(f"{found['answers']} answers, {len(found['wrong'])} wrong; memory grows by {slopes} MiB per minute")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if found["wrong"] or grows or not found["answers"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
