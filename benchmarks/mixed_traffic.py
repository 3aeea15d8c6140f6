"""Where the time of 256 mixed requests goes: the kind, tokens and time of each step, how long the GPU waited
before it, and the host's time by phase. Random weights of an 8B shape, greedy, as in ``beside_vllm.py``.

    python benchmarks/mixed_traffic.py --json FILE
    python benchmarks/mixed_traffic.py --layers 8 --quant w8a16 --json FILE
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import TOKEN_BUCKETS
from ingot.device import on_device
from ingot.kernels.built_ahead import built_ahead
from ingot.layers.forward_batch import ForwardBatch
from ingot.layers.step_layout import StepLayout
from ingot.llm.active_requests import ActiveRequests
from ingot.measure.side.machine import machine
from ingot.measure.side.token_load import PromptSource, fixed, mixed
from ingot.runtime.executor import Executor
from ingot.runtime.sampling.pending_tokens import TokenFeed, TokensInFlight
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.selection import TokenSelector
from ingot.runtime.step.runner import Runner
from ingot.runtime.step.step_buffer import StepBuffer

SHAPE = Path(__file__).parent / "shapes" / "llama31-8b.json"
REQUESTS, LONGEST = 256, 20480
LEAST_PROMPTS = 1792  # tokens of the least prompt graph that this traffic needs
# Host phases: a step's time is that of ``step``; the others are parts of it.
PHASES: tuple[tuple[str, type, str], ...] = (
    ("schedule", Scheduler, "schedule"),
    ("draws", TokenSelector, "draws"),
    ("launch", Runner, "launch"),
    ("fill", StepBuffer, "fill"),
    ("upload", StepBuffer, "upload"),
    ("replay", torch.cuda.CUDAGraph, "replay"),
    ("send", TokenFeed, "send"),
    ("wait", TokensInFlight, "wait"),
    ("read", Executor, "_read"),
    ("executor", Executor, "_step"),
    ("step", ActiveRequests, "step"),
)


class Watch:
    """Times the phases of every step, and the GPU's with events, while it is entered."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._plain: list[tuple[type, str, Any]] = []
        self.first_launch = 0.0

    def __enter__(self) -> Watch:
        for phase, owner, name in PHASES:
            plain = getattr(owner, name)
            self._plain.append((owner, name, plain))
            setattr(owner, name, self._timed(phase, plain))
        launch = Runner.launch
        self._plain.append((Runner, "launch", launch))
        Runner.launch = self._logged(launch)  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, plain in reversed(self._plain):
            setattr(owner, name, plain)

    def _timed(self, phase: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return plain(*args, **named)
            finally:
                self._now[phase] += time.perf_counter() - begun
                if phase == "step" and self.steps:
                    self.steps[-1].setdefault("host", dict(self._now))
                    self._now.clear()

        return call

    def _logged(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def launch(runner: Runner, step: ScheduledBatch, draws: Any) -> Any:
            self.first_launch = self.first_launch or time.perf_counter()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            found = plain(runner, step, draws)
            end.record()
            layout = step.layout
            kind = "decode" if layout.only_decodes else "prompt graph"
            if not layout.only_decodes and (runner.prompts is None or not runner.prompts.fits(layout)):
                kind = "eager"
            facts = {"kind": kind, "tokens": layout.num_tokens, "requests": layout.num_requests}
            facts |= {"decodes": layout.num_single, "keys": sum(layout.seq_lens), "events": (begin, end)}
            self.steps.append(facts)
            return found

        return launch

    def table(self) -> list[dict[str, Any]]:
        """A row per step, in ms; ``wait`` is the GPU's before the step, ``host_ms`` the host's by phase."""
        torch.cuda.synchronize()
        rows, before = [], None
        for step in self.steps:
            begin, end = step.pop("events")
            gpu = begin.elapsed_time(end)
            wait = 0.0 if before is None else before.elapsed_time(begin)
            host = {name: round(1e3 * value, 4) for name, value in step.pop("host", {}).items()}
            rows.append(step | {"gpu_ms": round(gpu, 4), "wait_ms": round(wait, 4), "host_ms": host})
            before = end
        return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums by kind of step; decode steps also by their bucket of 8 requests."""
    found: dict[str, Any] = {}
    for kind in ("decode", "prompt graph", "eager"):
        some = [row for row in rows if row["kind"] == kind]
        if some:
            host: Counter[str] = Counter()
            for row in some:
                host.update(row["host_ms"])
            found[kind] = {
                "steps": len(some),
                "tokens": sum(row["tokens"] for row in some),
                "decodes": sum(row["decodes"] for row in some),
                "gpu_ms": round(sum(row["gpu_ms"] for row in some), 1),
                "wait_ms": round(sum(row["wait_ms"] for row in some), 1),
                "host_ms": {name: round(value, 1) for name, value in host.items()},
            }
    buckets = defaultdict(list)
    for row in rows:
        if row["kind"] == "decode":
            buckets[-(-row["requests"] // 8) * 8].append(row)
    found["by_requests"] = {
        str(size): {
            "steps": len(some),
            "gpu_ms": round(statistics.median(row["gpu_ms"] for row in some), 3),
            "wait_ms": round(statistics.median(row["wait_ms"] for row in some), 4),
            "keys": round(statistics.mean(row["keys"] for row in some)),
            "host_ms": round(
                statistics.median(
                    row["host_ms"].get("step", 0) - row["host_ms"].get("wait", 0) for row in some
                ),
                3,
            ),
        }
        for size, some in sorted(buckets.items())
    }
    return found


def model(layers: int | None, quant: str | None, prompt_budget: int | None) -> LLM:
    shape = SHAPE
    if layers is not None:
        shape = Path(tempfile.mkdtemp()) / "config.json"
        changed = json.loads(SHAPE.read_text(encoding="utf-8")) | {"num_hidden_layers": layers}
        shape.write_text(json.dumps(changed), encoding="utf-8")
    runtime = RuntimeConfig(prompt_budget=prompt_budget)
    return LLM.from_config(
        shape, dtype="bf16", max_batch_size=REQUESTS, max_seq_len=LONGEST, quant=quant, runtime=runtime
    )


def wide_batch(runner: Runner, decodes: int) -> ForwardBatch:
    """A step of 8192 tokens, of so many decodes and 16 prompts; it has no graph."""
    counts = [1] * decodes + [(8192 - decodes) // 16] * 16
    blocks = [[0] * 16] * len(counts)
    layout = StepLayout.of([5] * decodes + [0] * 16, counts, blocks, runner.block_size)
    buffer = runner._eager_buffer()
    buffer.fill(layout)
    buffer.upload()
    return buffer.batch_of(layout, runner.max_seq_len)


def warmed(llm: LLM) -> None:
    """The graphs that this traffic needs: greedy decodes, and prompts of up to 256 requests."""
    runner = llm.executor.runner
    graphs, prompts = runner.graphs, runner.prompts
    assert graphs is not None
    assert prompts is not None

    def work() -> None:
        with on_device(runner.device):
            sizes = [(tokens, REQUESTS) for tokens in TOKEN_BUCKETS if tokens >= LEAST_PROMPTS]
            with torch.inference_mode(), built_ahead():
                graphs.launch_all(range(1, REQUESTS + 1), ["greedy"])
                for size in sizes:
                    prompts._launch_once(*prompts._padding(*size))
                for decodes in (0, 47):
                    runner.forward.launch_some(wide_batch(runner, decodes))
            for count in graphs.buckets:
                graphs.warm_up(count, ["greedy"])
            for size in sizes:
                prompts.capture(size)

    llm._calls.loop.between_steps(work)


class Traffic:
    """Runs of a warmed model, each with new random prompts."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.scheduler = llm, llm.executor.scheduler
        self.load, self.seeds = mixed(REQUESTS), PromptSource(126000)
        self.started = 0.0
        self.rows: list[dict[str, Any]] = []  # of the watched run's steps

    def run(self, asks: Any) -> float:
        """Seconds of greedy answers."""
        prompts = self.seeds.prompts(asks)
        params = [
            SamplingParams(max_new_tokens=one.new_tokens, ignore_eos=True, temperature=0.0) for one in asks
        ]
        self.started = time.perf_counter()
        self.llm.generate(prompts, params)
        return time.perf_counter() - self.started

    def first_tokens(self, count: int, tokens: int) -> dict[str, float]:
        """Milliseconds to the first launch, and to all first tokens."""
        with Watch() as watch:
            seconds = self.run(fixed(count, tokens, 1).asks)
        front = watch.first_launch - self.started
        return {"front_ms": round(1e3 * front, 2), "ms": round(1e3 * seconds, 2)}

    def watched(self) -> dict[str, Any]:
        """The mixed load, step by step."""
        with Watch() as watch:
            seconds = self.run(self.load.asks)
        self.rows = rows = watch.table()
        first = [[row["tokens"], row["decodes"], row["gpu_ms"], row["wait_ms"]] for row in rows[:14]]
        facts = {"tok_s": round(self.load.new_tokens / seconds), "seconds": round(seconds, 3), "first": first}
        return facts | summary(rows)

    def rate(self, budgets: str = "") -> int:
        """Tokens per second of the mixed load, from now on with these budgets, if any."""
        if budgets:
            self.scheduler.token_budget, self.scheduler.prompt_budget = map(int, budgets.split(":"))
        return round(self.load.new_tokens / self.run(self.load.asks))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--quant")
    parser.add_argument("--prompt-budget", type=int)
    parser.add_argument("--variants", default="", help="token_budget:prompt_budget, separated by commas")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no run begins")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args, begun = parsed(), time.perf_counter()
    found: dict[str, Any] = {"command": shlex.join(["python", *sys.argv])}
    found |= {"layers": args.layers, "quant": args.quant, "torch": torch.__version__}
    found |= {"card": torch.cuda.get_device_name(), "machine": machine(torch.device("cuda"))}
    print(found["card"], flush=True)

    def note(name: str, value: Any) -> None:
        found[name] = value
        args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
        print(f"[{time.perf_counter() - begun:.1f} s] {name}: {json.dumps(value)[:1500]}", flush=True)

    llm = model(args.layers, args.quant, args.prompt_budget)
    note("loaded", round(time.perf_counter() - begun, 1))
    warmed(llm)
    traffic = Traffic(llm)
    budgets = [traffic.scheduler.token_budget, traffic.scheduler.prompt_budget]
    note("warmed", {"budgets": budgets})
    traffic.run([ask.__class__(ask.prompt_tokens, 2) for ask in traffic.load.asks])
    plain = ":".join(map(str, budgets))
    tries: list[tuple[str, Callable[[], Any]]] = [
        ("64 x 512", lambda: [traffic.first_tokens(64, 512) for _ in range(4)]),
        ("watched", traffic.watched),
        ("tok_s", traffic.rate),
        *((text, partial(traffic.rate, text)) for text in args.variants.split(",") if text),
        (f"{plain} again", partial(traffic.rate, plain)),
    ]
    for name, call in tries:
        if time.perf_counter() - begun > args.until:
            print("no time for", name, flush=True)
            continue
        try:
            note(name, call())
        except Exception as error:  # one failure does not lose the rest
            note(name, repr(error)[:300])
    note("rows", [list(row.values()) for row in traffic.rows])


if __name__ == "__main__":
    main()
