"""Tokens per second through Triton Inference Server, beside the executor's own, and what a cancel costs.

The same prompts run by an executor alone in this process, and as many gRPC streams of the real server at
once, in turns. Then streams take all places, one more request waits, and one stream is cancelled: another
stream's tokens count the steps until the waiting request's first token. docs/triton.md says how to make the
environment. The last line is JSON.

    python benchmarks/triton_streams.py engines/pocket-chat --json docs/results/triton.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serve import executor_alone
from benchmarks.triton_server import TritonServer, started
from ingot import LLM, SamplingParams
from ingot.adapters.triton.model_repository import write_model
from ingot.adapters.triton.triton_settings import Settings
from ingot.measure.side.machine import machine

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(server: TritonServer) -> dict[str, float]:
    """CPU time so far of the server, its backend, the engine's process, and of clients that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {"server": 0.0, "backend": 0.0, "engine": 0.0, "client": ended.ru_utime + ended.ru_stime}
    wanted = {server.process.pid: "server"}
    for folder in sorted(
        (one for one in Path("/proc").iterdir() if one.name.isdigit()), key=lambda p: int(p.name)
    ):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parent = wanted.get(int(fields[1]))
        if parent in ("server", "backend"):
            wanted[int(folder.name)] = "backend" if parent == "server" else "engine"
        if int(folder.name) in wanted:
            found[wanted[int(folder.name)]] += (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def through_triton(server: TritonServer, texts: list[str], new_tokens: int) -> dict[str, Any]:
    """Tokens per second of all streams, from the first request to the last response, and CPU time."""
    values = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    before = cpu_seconds(server)
    answers = server.ask(
        {"model": "m", "requests": [{"text_input": text, "values": values} for text in texts]}
    )
    after = cpu_seconds(server)
    tokens = sum(sum(one["tokens"]) for one in answers)
    assert tokens == new_tokens * len(texts), [one["error"] for one in answers]
    seconds = max(one["times"][-1] for one in answers) - min(one["asked"] for one in answers)
    responses = sum(len(one["times"]) for one in answers)
    cpu = {name: 1000 * (after[name] - before[name]) / tokens for name in after}
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_response": tokens / responses,
        "cpu_ms_per_token": cpu,
    }


def steps_of_a_cancel(server: TritonServer, streams: int) -> int:
    """How many tokens another stream had between a cancel and the first token of the request that waited."""
    values = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
    texts = [f"Story {i}: a" for i in range(streams - 1)]
    rest = [{"text_input": text, "values": values} for text in texts]
    leaver = {"text_input": "Story: a", "values": values, "cancel_after": 20}
    waiter = {"text_input": "Story: the", "values": {**values, "max_tokens": 1}, "delay": 0.3}
    *others, left, waited = server.ask({"model": "m", "requests": [*rest, leaver, waiter]})
    first = waited["times"][0]
    return max(
        sum(n for at, n in zip(one["times"], one["tokens"], strict=True) if left["cancelled"] < at <= first)
        for one in others
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument(
        "--environment", type=Path, default=os.environ.get("INGOT_TRITON_ENV", ".venv-triton")
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's, of the executor")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = LLM(args.engine, max_batch_size=args.streams)
    gpu = llm.engine.device.index if llm.engine.device.type == "cuda" else None
    texts = [f"Story {i}: a fire broke out in a" for i in range(args.streams)]
    prompts = [llm.prompt_ids(text) for text in texts]
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    speeds: list[float] = []
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(
            args.engine, unproven=True, threads=args.threads, max_batch_size=args.streams,
            memory_fraction=0.45 if gpu is not None else None,
        )  # fmt: skip
        write_model(folder / "repository", "m", settings, gpu=gpu, copy=False)
        with started(args.environment.absolute(), folder / "repository", folder) as server:
            through_triton(server, texts, 8)
            for _ in range(args.runs):
                speeds.append(executor_alone(llm, prompts, params))
                runs.append(through_triton(server, texts, args.new_tokens))
            steps = [steps_of_a_cancel(server, args.streams) for _ in range(args.runs)]
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(llm.engine.device),
        "load_average": os.getloadavg()[0],
        "torch_threads": args.threads,
        "streams": args.streams,
        "new_tokens": args.new_tokens,
        "executor_tokens_per_s": speeds,
        "triton": runs,
        "cancel_steps": steps,
        "median": medians(speeds, runs, steps),
        "at": time.strftime("%Y-%m-%d"),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def medians(speeds: list[float], runs: list[dict[str, Any]], steps: list[int]) -> dict[str, float]:
    """The middle of each figure; ``share`` is of the executor's tokens per second, run by run."""

    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    found = {"executor": middle(speeds), "streams": middle([run["tokens_per_s"] for run in runs])}
    found["share"] = middle([run["tokens_per_s"] / speed for run, speed in zip(runs, speeds, strict=True)])
    for name in runs[0]["cpu_ms_per_token"]:
        found[f"cpu_{name}"] = middle([run["cpu_ms_per_token"][name] for run in runs])
    found["cancel_steps"] = middle([float(count) for count in steps])
    for name, value in found.items():
        print(f"{name:<14} {value:8.3f}")
    return found


if __name__ == "__main__":
    main()
