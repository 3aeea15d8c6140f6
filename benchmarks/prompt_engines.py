"""Time to the first tokens of 64 prompts by engine, with what follows a product in its kernel or apart.

Apart: SiLU and the addition to the hidden states are kernels of their own, in bf16 only SiLU. Both ways and
all budgets of a step in turn; every run has new random prompts of an 8B shape with random weights.

    python benchmarks/prompt_engines.py --json docs/results/prompt_engines.json
    python benchmarks/prompt_engines.py --quants none --budgets 2048 8192
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from prompt_steps import SHAPE, timed

from ingot import LLM
from ingot.config.runtime_config import RuntimeConfig
from ingot.layers.products import layer_products
from ingot.measure.side.machine import machine

NEVER = {"takes_gate_up": lambda x, w: False, "takes_many_rows": lambda x, w: False}
ALWAYS = {name: getattr(layer_products, name) for name in NEVER}  # where they pay


def engine(quant: str, requests: int, tokens: int, budget: int) -> LLM:
    """An 8B engine with random weights and a small cache."""
    runtime = RuntimeConfig(prompt_budget=budget, prefix_reuse=False, cache_tokens=requests * (tokens + 64))
    scheme = None if quant == "none" else quant
    return LLM.from_config(
        SHAPE, dtype="bf16", max_batch_size=requests, max_seq_len=tokens + 32, runtime=runtime, quant=scheme
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quants", nargs="+", default=["none", "w4a16", "w8a16"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192], help="tokens of a step of prompts")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    record: dict[str, Any] = {"command": shlex.join(["python", *sys.argv])}
    record["machine"] = machine(torch.device("cuda"))
    print(record["machine"].get("gpu"), flush=True)
    engines, rng = {}, random.Random(0)
    for quant in given.quants:
        begun = time.perf_counter()
        engines[quant] = engine(quant, given.requests, given.tokens, max(given.budgets))
        print(quant, f"loaded in {time.perf_counter() - begun:.1f} s", flush=True)
    times: dict[str, list[float]] = {}
    for turn in range(given.rounds + 1):  # the first is not counted
        for quant, llm in engines.items():
            for budget in given.budgets:
                for way, patches in (("fused", ALWAYS), ("apart", NEVER)):
                    llm.executor.scheduler.prompt_budget = budget
                    with mock.patch.multiple(layer_products, **patches):
                        taken = timed(llm, given.requests, given.tokens, rng)
                    times.setdefault(f"{quant} {budget} {way}", []).extend([taken] if turn else [])
    record["ttft_ms"] = {
        name: {
            "median": round(statistics.median(own), 1),
            "least": round(min(own), 1),
            "all": [round(one, 1) for one in own],
        }
        for name, own in times.items()
    }
    print(json.dumps(record["ttft_ms"], indent=1), flush=True)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
