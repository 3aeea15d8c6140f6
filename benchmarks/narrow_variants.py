"""Which tiles a decode step should use for weights of 8 and of 4 bits, timed inside the whole step.

Every op's candidates in turn, in a CUDA graph of 16 layers of the 7B shape and a head; what makes the step
faster stays for the next op. Kernels are compiled by all cores first. A line a case says what to enter in
``kernels/product_tiles.py``.

    python benchmarks/narrow_variants.py --json docs/results/narrow_variants.json
    python benchmarks/narrow_variants.py --cases 4x1,8x8                    # bits x rows
    python benchmarks/narrow_variants.py --dry --cases 4x2                  # tiny, on a CPU: no figures
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent))
from decode_candidates import Tiles
from decode_stack import Plan, Shape, Stack

from ingot.kernels.stored_weight import StoredWeight, num_rows, num_words

CASES = "4x1,4x8,4x16,4x32,4x64,8x1,8x8,8x16,8x32,8x64"
OPS = ("gate_up", "qkv", "down", "o")
SPLIT = ("down", "o")
LAYERS, GROUP, WORTH_US = 16, 128, 0.1  # a layer; less is noise
TINY = Shape(hidden=128, inner=256, heads=2, head_dim=64, vocabulary=96, context=32, block=16)
ALL = frozenset({*OPS, "head"})


def narrow_weight(outputs: int, width: int, bits: int, device: str) -> StoredWeight:
    """Random numbers; in 4 bits by groups, with zeros."""
    words = (num_rows(outputs), num_words(width, bits, GROUP if bits == 4 else 0))
    values = torch.randint(-(1 << 15), 1 << 15, words, dtype=torch.int16, device=device)
    step = 1.28 / width**0.5 / (4.6 if bits == 4 else 74)  # so that outputs are of order one
    if bits == 8:
        return StoredWeight(values, width, torch.full((outputs,), step, device=device).half(), None, 8)
    shape = (-(-width // GROUP), outputs)
    scales = torch.full(shape, step, device=device).half()
    zeros = torch.full(shape, 8, dtype=torch.uint8, device=device)
    return StoredWeight(values, width, scales, zeros, 4, GROUP)


class NarrowStack(Stack):
    """A stack whose layers' weights have few bits; the head stays."""

    def __init__(self, bits: int, rows: int, layers: int, dry: bool = False) -> None:
        device, shape = ("cpu", TINY) if dry else ("cuda", Shape())
        super().__init__(1, rows, device, shape, heads=1)
        self.layers = layers
        self.caches = [self.caches[0]] * layers if rows > 8 else [
            [torch.randn_like(t) for t in self.caches[0]] for _ in range(layers)
        ]  # fmt: skip
        for op, size in shape.products().items():
            if op != "head":
                self.weights[op] = [narrow_weight(*size, bits, device) for _ in range(layers)]  # type: ignore[misc]
        if not dry:
            torch.cuda.synchronize()


def candidates(op: str, rows: int) -> list[Tiles]:
    """What to try beside the default."""
    found: list[Tiles] = []
    if rows <= 8:
        for block in (16, 32) if op in SPLIT else (32, 64):
            for warps in (2, 4, 8):
                for depth in (1, 2):
                    tiles = {"BLOCK_N": block, "num_warps": warps, "FRAGMENTS": depth}
                    found += [tiles | {"SPLITS": s} for s in (2, 4, 8)] if op in SPLIT else [tiles]
        return found
    for block, warps in ((64, 4), (128, 8)):
        for prefetch in (0, 1):
            tiles = {"BLOCK_N": block, "num_warps": warps, "num_stages": 4, "PREFETCH": prefetch}
            if op in SPLIT:
                found += [tiles | {"PROGRAMS": 0, "SPLITS": s} for s in (4, 8)]
            else:
                found += [tiles | {"PROGRAMS": p} for p in (0, 2)]
    return found


def compile_share(rank: int, ranks: int, cases: list[tuple[int, int]]) -> None:
    """Launch one in ``ranks`` of all candidates once, so that its kernel is on disk."""
    stacks: dict[tuple[int, int], NarrowStack] = {}
    jobs = [(case, op, tiles) for case in cases for op in OPS for tiles in candidates(op, case[1])]
    for case, op, tiles in jobs[rank::ranks]:
        if case not in stacks:
            stacks = {case: NarrowStack(*case, layers=1)}
        _runs(lambda stack=stacks[case], op=op, tiles=tiles: stack.fused(op, 0, stack.batch, tiles))


def _runs(call: Any) -> bool:
    try:
        call()
        torch.cuda.synchronize()
    except Exception:
        return False  # more shared memory or registers than there are
    return True


def replay(stack: NarrowStack, plan: Plan, dry: bool) -> Any:
    """A call that times one step, in microseconds a layer; None for tiles that do not fit."""

    def step() -> torch.Tensor:
        return stack.hybrid_step(stack.batch, plan, ALL)

    if dry:
        step()
        return lambda: 0.0
    if not _runs(step):
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / stack.layers

    timed()
    return timed


def sweep(bits: int, rows: int, dry: bool) -> dict[str, Any]:
    """The best plan of a case, op by op, and what was tried."""
    stack = NarrowStack(bits, rows, 2 if dry else LAYERS, dry)
    plan: Plan = {}
    tried: dict[str, Any] = {}

    def median(timed: Any) -> float:
        return statistics.median(timed() for _ in range(5))

    first = median(replay(stack, plan, dry))
    for op in OPS:
        now = replay(stack, plan, dry)
        found = []
        for tiles in candidates(op, rows)[: 2 if dry else None]:
            timed = replay(stack, {**plan, op: tiles}, dry)
            if timed is not None:
                found.append((median(timed), tiles))
        found.sort(key=lambda pair: pair[0])
        if found and found[0][0] < median(now) - WORTH_US:
            plan[op] = found[0][1]
        tried[op] = found[:6]
    last = median(replay(stack, plan, dry))
    print(f"{bits} bits, {rows} rows: {first:.1f} -> {last:.1f} us a layer: {plan}", flush=True)
    return {"bits": bits, "rows": rows, "before_us": first, "after_us": last, "plan": plan, "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=CASES, help="bits x rows, comma-separated")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--dry", action="store_true", help="tiny, interpreted, on a CPU: no figures")
    given = parser.parse_args()
    cases = [tuple(int(n) for n in case.split("x")) for case in given.cases.split(",")]
    if not given.dry:
        begun, ranks = time.perf_counter(), max((os.cpu_count() or 2) - 1, 1)
        torch.multiprocessing.spawn(compile_share, (ranks, cases), nprocs=ranks)
        print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    rows = [sweep(bits, count, given.dry) for bits, count in cases]
    if given.json:
        gpu = "none" if given.dry else torch.cuda.get_device_name()
        told = {
            "command": " ".join(["python", *sys.argv]),
            "gpu": gpu,
            "torch": torch.__version__,
            "cases": rows,
        }
        given.json.write_text(json.dumps(told) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
