"""Sampling on the GPU: the kernels beside their PyTorch reference, by batch size and mix of parameters.

Every figure is one call in a CUDA graph that holds many calls, each on logits of its own that L2 does not
hold; medians and 90th percentiles over replays. Every case is first compared, token by token, with the
reference.
``--sweep`` times tile choices instead; ``--compile I/N`` only compiles every Nth (run N of them at once);
``--split`` gives each kernel's own time, which with an early start has its wait in it.

    python benchmarks/sampling.py --json docs/results/sampling.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from timing import graph_us

from ingot.kernels.sampling.token_draw import draw, greedy
from ingot.runtime.sampling.sampler import (
    RowSampling,
    SamplerOutput,
    SamplingTensors,
    sample,
    sample_reference,
)

VOCABULARY = 151936
FOOTPRINT = 200e6  # bytes of logits walked through by one graph
CASES = {
    "greedy": RowSampling(),
    "temperature": RowSampling(0.8),
    "temperature, min-p": RowSampling(0.8, min_p=0.05),
    "temperature, top-k 50": RowSampling(0.8, top_k=50),
    "temperature, top-p 0.9": RowSampling(0.8, top_p=0.9),
    "temperature, top-k 50, top-p 0.9": RowSampling(0.8, top_k=50, top_p=0.9),
    "temperature 2, top-p 0.99": RowSampling(2.0, top_p=0.99),
    "temperature, top-k 5000": RowSampling(0.8, top_k=5000),
}
SWEPT = ("greedy", "temperature", "temperature, top-p 0.9", "temperature, top-k 50, top-p 0.9")


def make_logits(rows: int, copies: int) -> list[torch.Tensor]:
    """fp16 rows of a bell shape, as a model's: likeliest some 4.5 standard deviations above the rest."""
    torch.manual_seed(0)
    shape = (rows, VOCABULARY)
    return [(torch.randn(shape, device="cuda") * 2.5).half() for _ in range(copies)]


def tensors_of(row: RowSampling, rows: int) -> SamplingTensors:
    """The row's parameters for a batch, each row with a seed of its own."""
    every = [
        RowSampling(row.temperature, row.top_k, row.top_p, row.min_p, seed=i, step=7) for i in range(rows)
    ]
    return SamplingTensors.from_rows(every, "cuda")


def figures_of(
    call: Callable[[torch.Tensor], Any], logits: list[torch.Tensor], repeats: int
) -> dict[str, float]:
    """Median and 90th percentile of one call, over replays of a graph that makes one for each logits."""
    times = [us / len(logits) for us in graph_us([partial(call, one) for one in logits], repeats)]
    return {"us": round(statistics.median(times), 2), "p90_us": round(times[int(0.9 * len(times))], 2)}


def with_tiles(tensors: SamplingTensors, tiles: dict[str, int]) -> Callable[[torch.Tensor], Any]:
    """``sample`` with tile choices."""
    if tensors.all_greedy:
        return lambda logits: greedy(logits, tiles)
    t, select = tensors, bool(tensors.max_top_k) or tensors.any_top_p
    return lambda logits: draw(
        logits, t.temperature, t.top_k, t.top_p, t.min_p, t.seed, t.step, select, tiles
    )


def candidates(case: str, rows: int) -> list[dict[str, int]]:
    """Tile choices to time."""
    if case == "greedy":
        choices: dict[str, tuple[int, ...]] = {
            "TILE": (1024, 2048, 4096), "num_warps": (2, 4, 8), "PROGRAMS": (16384,), "OVERLAP": (1, 2),
        }  # fmt: skip
    elif CASES[case].top_k or CASES[case].top_p < 1:
        choices = {
            "num_warps": (2, 4, 8), "TOPS_WARPS": (2, 4), "BIN_WARPS": (4, 8), "CUT_WARPS": (2, 4),
            "PROGRAMS": (1024, 4096), "CUT_PROGRAMS": (512, 1024, 2048), "BINS": (1024, 2048),
            "OVERLAP": (1, 2),
        }  # fmt: skip
    else:
        choices = {
            "TILE": (512, 1024), "num_warps": (2, 4, 8), "TOPS_WARPS": (1, 2, 4),
            "PROGRAMS": (1024, 4096, 16384), "OVERLAP": (1, 2),
        }  # fmt: skip
    chosen = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    few = [tiles for tiles in chosen if rows > 1 or tiles.get("CUT_PROGRAMS", 512) == 512]
    few = [tiles for tiles in few if rows > 1 or tiles["PROGRAMS"] in (1024, 16384) or case != "temperature"]
    return random.Random(0).sample(few, min(len(few), 48))


def sweep(rows: list[int], share: tuple[int, int] | None) -> dict[str, Any]:
    """Best tile choices by case and batch; with a share, only compile."""
    found: dict[str, Any] = {}
    for count in rows:
        copies = 1 if share else max(2, int(FOOTPRINT / (count * VOCABULARY * 2)))
        logits = make_logits(count, min(copies, 40))
        for case in SWEPT:
            tensors = tensors_of(CASES[case], count)
            todo = candidates(case, count)
            if share:
                for tiles in todo[share[0] :: share[1]]:
                    with_tiles(tensors, tiles)(logits[0])
                continue
            timed = [(figures_of(with_tiles(tensors, t), logits, 5)["us"], t) for t in todo]
            timed.sort(key=lambda pair: pair[0])
            found[f"{case}, {count}"] = timed[:20]
            for us, tiles in timed[:6]:
                print(f"{case} {count} rows {us:8.2f} us {tiles}", flush=True)
    torch.cuda.synchronize()
    return found


def measure(case: str, row: RowSampling, rows: int) -> dict[str, Any]:
    """One case at one batch size: the kernels, the reference, and whether their tokens are the same."""
    copies = max(2, min(int(FOOTPRINT / (rows * VOCABULARY * 2)), 40))
    logits, tensors = make_logits(rows, copies), tensors_of(row, rows)
    same = all(same_tokens(sample(one, tensors), sample_reference(one, tensors)) for one in logits[:3])
    kernels = figures_of(lambda one: sample(one, tensors), logits, 20)
    reference = figures_of(lambda one: sample_reference(one, tensors), logits[:2], 5)
    return {"case": case, "rows": rows, "kernels": kernels, "twin": reference, "same_tokens": same}


def split(case: str, row: RowSampling, rows: int) -> dict[str, Any]:
    """One case at one batch size: the mean time of each kernel, by the profiler, outside a graph."""
    logits, tensors = make_logits(rows, 4), tensors_of(row, rows)
    for one in logits:
        sample(one, tensors)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for one in logits * 5:
            sample(one, tensors)
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.count and e.key.endswith("_kernel")]
    times = {e.key: round(e.self_device_time_total / e.count, 2) for e in events}
    return {"case": case, "rows": rows, "kernels_us": times}


def same_tokens(one: SamplerOutput, other: SamplerOutput) -> bool:
    """Whether two outputs hold the same tokens and values."""
    return torch.equal(one.token_ids, other.token_ids) and torch.equal(one.values, other.values)


def main() -> None:
    """Time all cases, or sweep, and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", metavar="I/N")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [int(n) for n in arguments.rows.split(",")]
    if arguments.compile:
        index, count = (int(part) for part in arguments.compile.split("/"))
        sweep(rows, (index, count))
        return
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "logits": f"fp16, {VOCABULARY} a row, normal, standard deviation 2.5",
    }
    if arguments.sweep:
        results["swept_us"] = sweep(rows, None)
    else:
        results["cases"] = []
        for count, (case, row) in itertools.product(rows, CASES.items()):
            results["cases"].append((split if arguments.split else measure)(case, row, count))
            print(results["cases"][-1], flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
