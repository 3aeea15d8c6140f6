"""Products in fewer bits at the shapes of a 7B model: ours, as the engine runs them, and PyTorch's kernels.

Weight-only products by 8 and 4 bits (groups of 128, with zeros and without) and products of 8 bits on both
sides beside ``F.linear`` in fp16, ``torch._int_mm`` and PyTorch's own kernels for weights of 4 and of 8 bits.
Microseconds are the median of CUDA graph replays over copies of the weight in turn; GB/s are of the weight's
bytes as they are stored; the ceiling is the slower of reading them, as fast as this machine reads (measured),
and of multiplying, by the data sheet. Kernels are compiled by all cores first. Every result is checked.

    python benchmarks/quantized_products.py --json docs/results/quantized_products.json
    python benchmarks/quantized_products.py --rows 1 64 --shapes qkv
    python benchmarks/quantized_products.py --dry                      # tiny, on a CPU: no figures
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from int8_products import CEILING_TOPS, SHAPES
from quantized_sides import Side, apart, sides
from timing import graph_us

from ingot.measure.bench.ceiling import measure_ceiling
from ingot.measure.side.machine import machine

ROWS = (1, 16, 64, 256, 2048)
TINY = {"qkv": (384, 128), "o": (128, 128), "gate_up": (512, 128), "down": (128, 256)}
DRY_ROWS = (1, 16, 64, 264)
FP16_TFLOPS = 989.5  # an H200's tensor cores, fp16 without sparsity, by its data sheet
REPLAYS, FEW_REPLAYS = 15, 3
SLOW_US = 2000.0  # a kernel this slow needs neither copies nor many replays
APART = 0.02  # relative; more is another product
Row = dict[str, Any]


def measure(shape: str, rows: int, read_gb_s: float, dry: bool) -> list[Row]:
    """Every side of one product; one that cannot run says why."""
    device, (outputs, width) = ("cpu", TINY[shape]) if dry else ("cuda", SHAPES[shape])
    found: list[Row] = []
    for name, make in sides(shape, outputs, width, rows, device):
        row: Row = {"shape": shape, "rows": rows, "side": name}
        try:
            side = make()
            row |= {"side": side.name, "kernel": side.how} | _checked(side)
            if not dry:
                row |= _figures(side, rows * outputs * width, read_gb_s)
        except Exception as error:  # a library's limits are a row as well
            if not dry:
                torch.cuda.synchronize()
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        found.append(row)
    return found


def _checked(side: Side) -> Row:
    """How far the result is from what it must be.

    Raises:
        ArithmeticError: it is another product.
    """
    error = apart(side, side.call(*side.tensors))
    if not error < APART:
        raise ArithmeticError(f"the result is {error:.3g} from what it must be, relative to it")
    return {"apart": float(f"{error:.2g}")}


def _figures(side: Side, products: int, read_gb_s: float) -> Row:
    """Time and rates of a side; ``products``: pairs that are multiplied."""
    torch.cuda.synchronize()  # kernels that overlap read weights before they wait
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    side.call(*side.tensors)
    end.record()
    end.synchronize()
    slow = start.elapsed_time(end) * 1e3 > SLOW_US
    calls = [lambda: side.call(*side.tensors)] if slow else side.calls()
    torch.cuda.synchronize()
    times = graph_us(calls, FEW_REPLAYS if slow else REPLAYS)
    us = times[len(times) // 2] / len(calls)
    peak = CEILING_TOPS if side.int8 else FP16_TFLOPS
    reading, multiplying = side.weight_bytes / read_gb_s / 1e3, 2 * products / peak / 1e6
    return {
        "us": round(us, 2),
        "gb_s": round(side.weight_bytes / us / 1e3),
        "tops": round(2 * products / us / 1e6, 1),
        "percent": round(100 * max(reading, multiplying) / us, 1),
        "ceiling": "reading" if reading > multiplying else "multiplying",
    }


def compile_share(rank: int, ranks: int, cases: list[tuple[str, int]]) -> None:
    """Run one in ``ranks`` of our kernels once, so that it is on disk."""
    torch.cuda.set_device(0)
    jobs = [(shape, rows, place) for shape, rows in cases for place in range(1, 5)]
    for shape, rows, place in jobs[rank::ranks]:
        make = list(sides(shape, *SHAPES[shape], rows, "cuda"))[place][1]
        try:
            side = make()
            side.call(*side.tensors)
            torch.cuda.synchronize()
        except Exception:  # the table says why
            continue


def table(rows: list[Row]) -> str:
    """All rows as a table in Markdown."""
    head = ("product", "rows", "weights", "kernel", "µs", "GB/s", "TOPS", "% of ceiling", "ceiling")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        figures = [row.get(name, "") for name in ("us", "gb_s", "tops", "percent", "ceiling")]
        if "error" in row:
            figures = ["", "", "", "", row["error"].replace("|", "/")]
        cells = [row["shape"], row["rows"], row["side"], row.get("kernel", ""), *figures]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", help=f"default {ROWS}")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU: no figures")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cpu" if given.dry else "cuda")
    results: Row = {"command": shlex.join(["python", *sys.argv]), "machine": machine(device), "rows": []}
    counts = given.rows or (DRY_ROWS if given.dry else ROWS)
    cases = [(shape, rows) for shape in given.shapes for rows in counts]
    read_gb_s = 0.0
    if not given.dry:
        begun, ranks = time.perf_counter(), max((os.cpu_count() or 2) - 1, 1)
        torch.multiprocessing.spawn(compile_share, (ranks, cases), nprocs=ranks)
        print(f"compiled in {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        read_gb_s = measure_ceiling(device, torch.float16).read_gb_s
        results["ceilings"] = {"read_gb_s": read_gb_s, "fp16_tflops": FP16_TFLOPS, "int8_tops": CEILING_TOPS}
    for shape, rows in cases:
        found = measure(shape, rows, read_gb_s, given.dry)
        for row in found:
            print(row, file=sys.stderr, flush=True)
        results["rows"] += found
        if given.json:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(table(results["rows"]))


if __name__ == "__main__":
    main()
