"""What the event loop feels while a large body becomes token ids: in a thread, or in a process of its own.

A task wakes every 5 ms and writes 20 chunks to a socket, as a step's streams need. Its wakes are timed while
bodies of benchmarks/neighbours.py are tokenized in a thread, in a thread with a switch interval of 0.5 ms,
and in the process that the server uses. The last line is JSON.

    python benchmarks/prompt_process.py engines/pocket-chat --json docs/results/prompt_process.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from neighbours import Maker  # noqa: E402

from ingot.errors import RequestError  # noqa: E402
from ingot.llm.prompt_inputs import Chat, prompt_entry  # noqa: E402
from ingot.serve.long_prompts import LongPromptError, LongPrompts  # noqa: E402
from ingot.serve.served_model import TextSide  # noqa: E402

SLEEP = 0.005
WAYS = {"thread": 0.005, "short_switches": 0.0005, "process": 0.005}


async def felt(work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds between two wakes, and of the work, while it runs in a thread."""
    ours, theirs = socket.socketpair()
    wakes: list[float] = []
    running = asyncio.get_running_loop().run_in_executor(None, work)
    start = time.perf_counter()
    while not running.done():
        for _ in range(20):
            ours.send(b"x" * 200)
            theirs.recv(4096)
        wakes.append(time.perf_counter())
        await asyncio.sleep(SLEEP)
    gaps = sorted(1e3 * (b - a) for a, b in pairwise(wakes)) or [0.0]
    p99 = gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)]
    took = 1e3 * (time.perf_counter() - start)
    return {"took_ms": took, "p50_ms": statistics.median(gaps), "p99_ms": p99, "max_ms": gaps[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    side = TextSide.read("m", args.engine)
    long = LongPrompts(side.folder, side.manifest, most=1 << 17)
    maker = Maker("m", 8192, 1.7, 1)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for kind in ("long", "talk", "refused"):
        body: dict[str, Any] = json.loads(getattr(maker, kind)().split(b"\r\n\r\n", 1)[1])
        chat = Chat(body["messages"])
        for run in range(-1, args.runs):  # the first warms up
            for way, interval in WAYS.items():
                sys.setswitchinterval(interval)

                def work(way: str = way, chat: Chat = chat) -> None:
                    try:
                        long.chat_ids(chat) if way == "process" else prompt_entry(chat, side.text)
                    except (RequestError, LongPromptError):
                        return

                one = asyncio.run(felt(work))
                if run >= 0:
                    found.setdefault(kind, {}).setdefault(way, []).append(one)
    long.close()
    middle = {
        kind: {
            way: {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
            for way, runs in ways.items()
        }
        for kind, ways in found.items()
    }
    for kind, ways in middle.items():
        for way, one in ways.items():
            print(f"{kind:<8} {way:<24} {one}")
    result = {"command": shlex.join(["python", *sys.argv]), "runs": args.runs, "median": middle}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
