"""Tokens per second through the server, beside the executor's own.

The same prompts run three ways: by an executor alone in this process, as many streams over HTTP at once, and
as many whole answers over HTTP at once. The client only counts, in a process beside the server's two. The
last line is JSON.

    python benchmarks/serve.py engines/pocket-chat --json docs/results/serve.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ingot import LLM, SamplingParams
from ingot.bench.machine import machine


def executor_alone(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Tokens per second of the executor's loop: ids in, ids out."""
    start, count = time.perf_counter(), 0
    for position, ids in enumerate(prompts):
        llm.executor.add(f"r{position}", ids, params)
    while llm.executor.has_work:
        count += sum(len(update.token_ids) for update in llm.executor.step())
    return count / (time.perf_counter() - start)


async def through_http(port: int, bodies: list[bytes]) -> float:
    """Tokens per second of all requests together, by the usage that the answers tell."""
    start = time.perf_counter()
    counts = await asyncio.gather(*(one_request(port, body) for body in bodies))
    return sum(counts) / (time.perf_counter() - start)


async def one_request(port: int, body: bytes) -> int:
    """Send one request on a connection of its own; returns the tokens of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    data = await reader.read()
    writer.close()
    found = data.rpartition(b'"completion_tokens":')[2].partition(b",")[0]
    return int(found)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's, of the executor")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = LLM(args.engine)
    texts = [f"Story {i}: a fire broke out in a" for i in range(args.streams)]
    prompts = [llm.prompt_ids(text) for text in texts]
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    values = {"model": "m", "max_tokens": args.new_tokens, "ignore_eos": True}
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    whole = [json.dumps({**values, "prompt": text}).encode() for text in texts]
    streamed = [json.dumps({**values, **streams, "prompt": text}).encode() for text in texts]
    server, port = start_server(args.engine, args.threads)
    speeds: dict[str, list[float]] = {"executor": [], "streams": [], "answers": []}
    try:
        asyncio.run(through_http(port, streamed))
        for _ in range(args.runs):
            speeds["executor"].append(executor_alone(llm, prompts, params))
            speeds["streams"].append(asyncio.run(through_http(port, streamed)))
            speeds["answers"].append(asyncio.run(through_http(port, whole)))
    finally:
        server.terminate()
        server.wait()
    middle = {name: sorted(found)[len(found) // 2] for name, found in speeds.items()}
    for name, speed in middle.items():
        print(f"{name:<8} {speed:8.0f} tokens/s  {speed / middle['executor']:.2f}x")
    result = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(llm.engine.device),
        "torch_threads": args.threads,
        "streams": args.streams,
        "new_tokens": args.new_tokens,
        "tokens_per_s": speeds,
        "median": middle,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
