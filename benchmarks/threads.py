"""Answers asked for by many threads of one LLM, beside the same answers asked for one by one.

Every caller waits for an answer before it asks for the next, as a server's clients do. The answers must be
equal. The last line is JSON; the exit code is 1 where an answer differs.

    python benchmarks/threads.py engines/pocket-chat --json docs/results/threads.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ingot import LLM, SamplingParams
from ingot.measure.side.machine import machine

Asked = list[tuple[list[dict[str, str]], SamplingParams]]
Answers = list[list[list[int]]]


def requests(llm: LLM, thread: int, count: int, new_tokens: int) -> Asked:
    """Sums and stories, every second one drawn; each goes on for ``new_tokens``."""
    found: Asked = []
    for i in range(count):
        text = f"How much is {thread} + {i}?" if i % 3 else f"Tell me story {i} about a fox."
        params = SamplingParams(temperature=0.7 * (i % 2), seed=i, max_new_tokens=new_tokens, ignore_eos=True)
        found.append(([{"role": "user", "content": text}], params))
    return found


def serial(llm: LLM, asked: list[Asked]) -> Answers:
    """One call after another."""
    return [[llm.chat(*one).token_ids for one in mine] for mine in asked]


def threads(llm: LLM, asked: list[Asked]) -> Answers:
    """Each list in a thread."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda mine: [llm.chat(*one).token_ids for one in mine], asked))


def tasks(llm: LLM, asked: list[Asked]) -> Answers:
    """Each list in an asyncio task."""

    async def task(mine: Asked) -> list[list[int]]:
        return [(await llm.agenerate(*one))[0].token_ids for one in mine]

    async def main() -> Answers:
        return await asyncio.gather(*map(task, asked))

    return asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--answers", type=int, default=50, help="of each thread")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(args.engine, args.device)
    llm.warm_up(range(1, min(args.threads, llm.executor.max_batch_size) + 1))
    asked = [requests(llm, t, args.answers, args.new_tokens) for t in range(args.threads)]
    ways: dict[str, Callable[[LLM, list[Asked]], Answers]] = {
        "serial": serial,
        "threads": threads,
        "tasks": tasks,
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    expected, differ = serial(llm, asked), 0
    for _ in range(args.runs):
        for name, way in ways.items():
            start = time.perf_counter()
            found = way(llm, asked)
            seconds = time.perf_counter() - start
            speeds[name].append(sum(len(ids) for mine in found for ids in mine) / seconds)
            differ += sum(
                a != b for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)
            )
    middle = {name: sorted(found)[len(found) // 2] for name, found in speeds.items()}
    for name, speed in middle.items():
        print(f"{name:<8} {speed:8.0f} tokens/s  {speed / middle['serial']:.2f}x")
    print(f"{differ} answers differ from serial ones")
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(llm.engine.device),
        "torch_threads": torch.get_num_threads(),
        "threads": args.threads,
        "answers_each": args.answers,
        "new_tokens": args.new_tokens,
        "tokens_per_s": speeds,
        "median": middle,
        "differ": differ,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
