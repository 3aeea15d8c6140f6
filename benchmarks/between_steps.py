"""Decode steps of an 8B shape with random weights and caches: one replay, and the runtime's loop around it.

A step's time by itself is that of replays one after the other; the loop fills, uploads, replays and reads one
step behind, as the executor does. Their difference is what stands between two steps.

    python benchmarks/between_steps.py benchmarks/shapes/llama31-8b.json --json FILE
    python benchmarks/between_steps.py benchmarks/shapes/llama31-8b.json --layers 8 --sizes 1x600 --json FILE
    python benchmarks/between_steps.py benchmarks/shapes/llama31-8b.json --quant w8a16 --sizes 64x600 --json F
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot import LLM
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import on_device
from ingot.kernels.built_ahead import built_ahead
from ingot.layers.step_layout import StepLayout
from ingot.measure.side.machine import machine
from ingot.runtime.sampling.sampler import RowSampling
from ingot.runtime.step.graphs import GREEDY
from ingot.runtime.step.runner import Runner

LONGEST, SIZES = 20480, "1x600,8x600,64x600,8x16000"
FEW, ROUNDS, REPEATS = 3, 16, 5


def open_model(shape: Path, layers: int, tokens: int, batch: int, quant: str | None) -> LLM:
    """The shape with random weights and so many layers, and a cache for so many tokens."""
    config = json.loads(shape.read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    runtime = RuntimeConfig(cache_tokens=tokens)
    return LLM.from_config(
        path, dtype="bf16", max_batch_size=batch, max_seq_len=LONGEST, runtime=runtime, quant=quant
    )


class Steps:
    """A captured step of ``batch`` requests, each after ``length`` tokens in random blocks."""

    def __init__(self, runner: Runner, batch: int, length: int) -> None:
        assert runner.graphs is not None
        self.runner, self.graphs, self.batch = runner, runner.graphs, batch
        each = length // runner.block_size + 1
        order = torch.randperm(batch * each).tolist()
        blocks = [order[row * each : (row + 1) * each] for row in range(batch)]
        feeds = list(range(batch))
        sizes = ([length] * batch, [1] * batch)
        self.layout = StepLayout.of(*sizes, blocks, runner.block_size, feeds=feeds)
        self.draws = [RowSampling()] * batch
        for _ in range(2):  # both host sides
            self.graphs.launch(self.layout, self.draws)
        torch.cuda.synchronize()
        self.graph = self.graphs._captured[self.graphs.bucket_of(batch), GREEDY].graph

    def loop(self, steps: int) -> None:
        """As the executor does: a step is sent, then the tokens of the one before are read."""
        before = None
        for _ in range(steps):
            self.graphs.launch(self.layout, self.draws)
            now = self.runner.feed.send(self.batch)
            if before is not None:
                before.wait()
            before = now
        torch.cuda.synchronize()

    def replays(self, steps: int) -> None:
        """Nothing but the graph."""
        for _ in range(steps):
            self.graph.replay()
        torch.cuda.synchronize()

    def figures(self) -> dict[str, Any]:
        """Microseconds of a step, median and all, by itself and in the loop, in turn."""
        times: dict[str, list[float]] = {"replay_us": [], "loop_us": []}
        for _ in range(REPEATS):
            for name, run in (("replay_us", self.replays), ("loop_us", self.loop)):
                times[name].append(clocked(run))
        found: dict[str, Any] = {name: round(statistics.median(each), 1) for name, each in times.items()}
        between = round(found["loop_us"] - found["replay_us"], 1)
        every = {name: [round(us, 1) for us in each] for name, each in times.items()}
        return {**found, "between_us": between, "all": every}


def clocked(run: Callable[[int], None]) -> float:
    """Microseconds of each further step: the first ones wait for the host."""
    seconds = []
    for steps in (FEW, FEW + ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run(steps)
        seconds.append(time.perf_counter() - begun)
    return (seconds[1] - seconds[0]) * 1e6 / ROUNDS


def ready(llm: LLM, batches: set[int]) -> Runner:
    """The runner, its kernels built, its cache random."""
    runner = llm.executor.runner
    assert runner.graphs is not None
    with torch.inference_mode(), on_device(runner.device):
        with built_ahead():
            runner.graphs.launch_all(sorted(batches), ["greedy"])
        for tensor in (tensor for cache in runner.caches for tensor in cache.tensors):
            tensor.normal_()
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="0: the shape's")
    parser.add_argument("--quant", help="a scheme; by default none")
    parser.add_argument("--sizes", default=SIZES, help="requests x tokens before the step")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    asked = [one.split("x") for one in given.sizes.split(",")]
    sizes = [(int(batch), int(length)) for batch, length in asked]
    tokens = max(batch * (length + 64) for batch, length in sizes)
    llm = open_model(given.shape, given.layers, tokens, max(batch for batch, _ in sizes), given.quant)
    runner = ready(llm, {batch for batch, _ in sizes})
    record: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/between_steps.py", *sys.argv[1:-1], "FILE"]),
        "machine": machine(runner.device),
        "steps": {},
    }
    for batch, length in sizes:
        with torch.inference_mode(), on_device(runner.device):
            record["steps"][f"{batch}x{length}"] = found = Steps(runner, batch, length).figures()
        print(f"{batch}x{length}", json.dumps(found), flush=True)
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
