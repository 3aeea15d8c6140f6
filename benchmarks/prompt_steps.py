"""How many tokens a step of prompts should have: time to 64 first tokens by `prompt_budget`, kernels and the
layers' products alone.

    python benchmarks/prompt_steps.py --json out.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.runtime.step.runner import Runner

SHAPE = Path(__file__).parent / "shapes" / "llama31-8b.json"


def timed(llm: LLM, requests: int, tokens: int, rng: random.Random) -> float:
    """Milliseconds to the last first token."""
    prompts = [[rng.randrange(100, 120000) for _ in range(tokens)] for _ in range(requests)]
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    llm.generate(prompts, params)
    return (time.perf_counter() - begun) * 1e3


def host_times(call: Callable[[], Any]) -> list[float]:
    """Milliseconds of the host per launched step."""
    times: list[float] = []
    plain = Runner.launch

    def launch(self: Runner, *args: Any) -> Any:
        begun = time.perf_counter()
        found = plain(self, *args)
        times.append((time.perf_counter() - begun) * 1e3)
        return found

    Runner.launch = launch  # type: ignore[method-assign]
    try:
        call()
    finally:
        Runner.launch = plain  # type: ignore[method-assign]
    return [round(t, 2) for t in times]


def kernels(call: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds and launches by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 1e3
    top = {e.key[:70]: [round(e.self_device_time_total / 1e3, 2), e.count] for e in events[:12]}
    return {"total_ms": round(total, 1), "kernels": top}


@torch.inference_mode()
def products(llm: LLM, rows: int, total: int = 32768) -> dict[str, float]:
    """Milliseconds of all layers' products of ``total`` rows, so many at once, with the layers' own weights,
    and their TFLOP/s.
    """
    layers = llm.executor.runner.model.layers
    device = torch.device("cuda")
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    weights = [[layer.get_submodule(name).weight for name in names] for layer in layers]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], device=device, dtype=w.dtype) for w in weights[0]}
    outs = {w.shape[0]: torch.empty(rows, w.shape[0], device=device, dtype=w.dtype) for w in weights[0]}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(total // rows):
        for layer in weights:
            for w in layer:
                torch.mm(inputs[w.shape[1]], w.t(), out=outs[w.shape[0]])
    end.record()
    end.synchronize()
    ms = begin.elapsed_time(end)
    flop = 2 * total * sum(w.numel() for layer in weights for w in layer)
    return {"ms": round(ms, 1), "tflops": round(flop / ms / 1e9, 1)}


def tried(name: str, found: dict[str, Any], call: Callable[[], Any]) -> None:
    begun = time.perf_counter()
    try:
        found[name] = call()
    except Exception as error:  # one failure does not lose the rest
        found[name] = repr(error)[:300]
    print(f"[{time.perf_counter() - begun:.1f} s]", name, json.dumps(found[name]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budgets", default="2048,8192,16384")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    budgets = [int(b) for b in args.budgets.split(",")]
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(found["card"], flush=True)
    begun = time.perf_counter()
    runtime = RuntimeConfig(prompt_budget=max(budgets), prefix_reuse=False)
    llm = LLM.from_config(SHAPE, dtype="bf16", max_batch_size=256, max_seq_len=20480, runtime=runtime)
    print(f"loaded in {time.perf_counter() - begun:.1f} s", flush=True)
    scheduler, rng = llm.executor.scheduler, random.Random(0)

    def ttft(budget: int) -> float:
        scheduler.prompt_budget = budget
        return timed(llm, 64, 512, rng)

    for budget in budgets:
        tried(f"first_{budget}", found, lambda b=budget: round(ttft(b), 1))
    times: dict[int, list[float]] = {b: [] for b in budgets}
    for _ in range(args.rounds):
        for budget in budgets:
            times[budget].append(round(ttft(budget), 1))
    found["ttft_64x512_ms"] = {
        b: {"median": statistics.median(t), "least": min(t), "all": t} for b, t in times.items()
    }
    print("ttft", json.dumps(found["ttft_64x512_ms"]), flush=True)
    for rows in budgets:
        tried(f"products_{rows}", found, lambda r=rows: products(llm, r))
    for budget in (budgets[0], 8192):
        tried(f"host_ms_{budget}", found, lambda b=budget: host_times(lambda: ttft(b)))
        tried(f"kernels_{budget}", found, lambda b=budget: kernels(lambda: ttft(b)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
