"""Tokens per second through the server, beside the executor's own, and what HTTP adds to the first token.

The same prompts run three ways: by an executor alone in this process, as many streams over HTTP at once, and
as many whole answers over HTTP at once. Then one request at a time, for the time until its first token. Every
run has prompts of its own, which no cache knows. The client only counts, in a process beside the server's
two. The last line is JSON.

    python benchmarks/serve.py engines/pocket-chat --json docs/results/serve.json
    python benchmarks/serve.py engines/7b --streams 64 --prompt-tokens 512 --cache-tokens 65536
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.measure.side.machine import machine

FIRSTS = 25  # requests, one at a time, of the time to the first token


def executor_alone(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Tokens per second of the executor's loop: ids in, ids out."""
    start, count = time.perf_counter(), 0
    for position, ids in enumerate(prompts):
        llm.executor.add(f"r{position}", ids, params)
    while llm.executor.has_work:
        count += sum(len(update.token_ids) for update in llm.executor.step())
    return count / (time.perf_counter() - start)


def first_of_executor(llm: LLM, prompt: list[int], params: SamplingParams) -> float:
    """Milliseconds until the executor gives the first token of a request that is alone."""
    start, first = time.perf_counter(), 0.0
    llm.executor.add("first", prompt, params)
    while llm.executor.has_work:
        if any(update.token_ids for update in llm.executor.step()):
            first = first or time.perf_counter() - start
    return 1e3 * first


async def through_http(port: int, bodies: list[bytes]) -> float:
    """Tokens per second of all requests together, by the usage in the answers."""
    start = time.perf_counter()
    counts = await asyncio.gather(*(one_request(port, body) for body in bodies))
    return sum(counts) / (time.perf_counter() - start)


async def one_request(port: int, body: bytes) -> int:
    """Send one request on a connection of its own; returns the tokens of its answer."""
    reader, writer = await asked(port, body)
    data = await reader.read()
    writer.close()
    found = data.rpartition(b'"completion_tokens":')[2].partition(b",")[0]
    return int(found)


async def first_through_http(port: int, body: bytes) -> float:
    """Milliseconds from before the connection until the stream's first token."""
    start = time.perf_counter()
    reader, writer = await asked(port, body)
    while b'"choices":[{' not in await reader.readline():
        pass
    first = time.perf_counter() - start
    await reader.read()
    writer.close()
    return 1e3 * first


async def asked(port: int, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The connection of a request that was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Connection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return reader, writer


def start_server(
    engine: str, threads: int | None, flags: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], int]:
    """A server on a free port."""
    words = [sys.executable, "-m", "ingot", "serve", engine, "--port", "0", "--name", "m", "--unproven"]
    words += [*([] if threads is None else ["--threads", str(threads)]), *flags]
    server = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"}
    )
    assert server.stderr is not None
    for line in server.stderr:
        if line.startswith("serving"):
            return server, int(line.strip().rpartition(":")[2])
    raise SystemExit("the server did not start")


class Prompts:
    """Prompts that nobody has had: sentences, or so many random ids."""

    def __init__(self, llm: LLM, tokens: int | None) -> None:
        self._llm, self._tokens, self._random = llm, tokens, random.Random(0)

    def some(self, count: int) -> list[list[int]]:
        """Ids of that many prompts."""
        if self._tokens is None:
            texts = (f"Story {self._random.randrange(9999)}: a fire broke out in a" for _ in range(count))
            return [self._llm.prompt_ids(text) for text in texts]
        vocab = min(30000, self._llm.engine.manifest.model.vocab_size)
        return [[self._random.randrange(100, vocab) for _ in range(self._tokens)] for _ in range(count)]


def measured(llm: LLM, port: int, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Tokens per second and milliseconds to the first token, of every run, by way."""
    prompts = Prompts(llm, args.prompt_tokens)
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    values = {"model": "m", "max_tokens": args.new_tokens, "ignore_eos": True}
    streams = {"stream": True, "stream_options": {"include_usage": True}}

    def bodies(values: dict[str, Any]) -> list[bytes]:
        return [json.dumps({**values, "prompt": ids}).encode() for ids in prompts.some(args.streams)]

    asyncio.run(through_http(port, bodies(values | streams)))
    executor_alone(llm, prompts.some(args.streams), params)
    speeds: dict[str, list[float]] = {"executor": [], "streams": [], "answers": []}
    for _ in range(args.runs):
        speeds["executor"].append(executor_alone(llm, prompts.some(args.streams), params))
        speeds["streams"].append(asyncio.run(through_http(port, bodies(values | streams))))
        speeds["answers"].append(asyncio.run(through_http(port, bodies(values))))
    firsts: dict[str, list[float]] = {"executor": [], "streams": []}
    short = {**values, **streams, "max_tokens": 4}
    for number in range(FIRSTS + 2):
        ours, theirs = prompts.some(2)
        alone = first_of_executor(llm, ours, params.replace(max_new_tokens=4))
        body = json.dumps({**short, "prompt": theirs}).encode()
        over_http = asyncio.run(first_through_http(port, body))
        if number >= 2:
            firsts["executor"].append(alone)
            firsts["streams"].append(over_http)
    return {"tokens_per_s": speeds, "ttft_ms": firsts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, help="random ids in place of a sentence")
    parser.add_argument("--cache-tokens", type=int, help="KV cache of the server, and of the executor")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's, of the executor")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sized = {} if args.cache_tokens is None else {"cache_tokens": args.cache_tokens}
    llm = LLM(args.engine, runtime=RuntimeConfig(**sized), max_batch_size=args.streams)
    llm.warm_up()
    flags = ["--max-batch-size", str(args.streams)]
    flags += [] if args.cache_tokens is None else ["--cache-tokens", str(args.cache_tokens)]
    server, port = start_server(args.engine, args.threads, flags)
    try:
        found = measured(llm, port, args)
    finally:
        server.terminate()
        server.wait()
    middle = {name: sorted(values)[len(values) // 2] for name, values in found["tokens_per_s"].items()}
    for name, speed in middle.items():
        print(f"{name:<8} {speed:8.0f} tokens/s  {speed / middle['executor']:.2f}x")
    first = {name: sorted(values)[len(values) // 2] for name, values in found["ttft_ms"].items()}
    for name, ms in first.items():
        print(f"{name:<8} {ms:8.1f} ms to the first token, alone  {ms - first['executor']:+.1f}")
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(llm.engine.device),
        "torch_threads": args.threads,
        "streams": args.streams,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        **found,
        "median": middle,
        "ttft_median_ms": first,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
