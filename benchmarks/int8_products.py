"""Products of numbers of 8 bits, ours by tiles and the matrix library's, at the shapes of a 7B model.

Every candidate of ``kernels/int8_tiles.py`` at every shape: microseconds (median of CUDA graph replays), TOPS
and % of the GPU's dense int8 ceiling. Beside it ``torch._int_mm`` alone and with the epilogue that our
kernels have inside (scales, to 16 bits), compiled by PyTorch, and the fp16 product. Data are random: zeros
draw less power and run faster. One JSON list on the last line.

    python benchmarks/int8_products.py                        # all; some minutes
    python benchmarks/int8_products.py --rows 2048 4096 --shapes qkv gate_up
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from ingot.kernels.int8_linear import int8_linear
from ingot.kernels.int8_rows import Int8Rows, Int8Weight
from ingot.kernels.int8_tiles import (
    large_int8_candidates,
    large_int8_tiles,
    small_int8_candidates,
    small_int8_tiles,
)
from ingot.kernels.matrix_product import multiprocessors
from ingot.kernels.overlap import overlaps
from ingot.kernels.product_tiles import shared_bytes
from ingot.kernels.small_int8 import int8_linear_parts
from ingot.kernels.small_product import MAX_ROWS

ROWS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
SHAPES = {"qkv": (12288, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)}
CEILING_TOPS = 1979.0  # an H200's tensor cores, int8 without sparsity, by its data sheet
COPIES_BYTES = 256 << 20  # of weights in turn, so that none comes from L2
HEAD_DIM = 128


def numbers(*shape: int) -> torch.Tensor:
    """Random numbers of 8 bits, as normal activations and weights have them."""
    return (torch.randn(shape, device="cuda") * 40).round().clamp(-127, 127).to(torch.int8)


def microseconds(calls: list[Callable[[], Any]], replays: int = 15) -> float:
    """Median of graph replays of the calls one after another, for one call."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return sorted(times)[len(times) // 2]


def scaled(sums: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The epilogue that our kernels have inside."""
    return (sums.float() * rows[:, None] * columns).half()


def timed(name: str, calls: list[Callable[[], Any]], operations: int, **notes: Any) -> dict[str, Any]:
    """A row of the table; a variant that cannot run says why."""
    try:
        found = microseconds(calls)
    except Exception as error:  # tiles that do not fit this GPU, a library's limits: a row as well
        torch.cuda.synchronize()
        return {"name": name, **notes, "error": f"{type(error).__name__}: {error}"[:200]}
    tops = operations / found / 1e6
    share = 100 * tops / CEILING_TOPS
    return {"name": name, **notes, "us": round(found, 2), "tops": round(tops, 1), "percent": round(share, 1)}


def measure(shape: str, rows: int) -> list[dict[str, Any]]:
    """All ways of one product."""
    outputs, width = SHAPES[shape]
    group = HEAD_DIM if shape == "o" else 0
    copies = max(1, min(COPIES_BYTES // (outputs * width), 8))
    weights = [Int8Weight(numbers(outputs, width), torch.rand(outputs, device="cuda")) for _ in range(copies)]
    values = numbers(rows, width)
    plain = Int8Rows(values, torch.rand(rows, device="cuda"))
    grouped = Int8Rows(values, torch.rand(rows, width // HEAD_DIM, device="cuda"), HEAD_DIM)
    torch.cuda.synchronize()
    count, notes = 2 * rows * outputs * width, {"shape": shape, "rows": rows}
    found = []
    for x in (plain, grouped) if group else (plain,):
        kind = "groups" if x.group else "rows"
        for index, tiles in enumerate(candidates(x, outputs, shape in ("o", "down"))):
            name = f"ours, {kind}" + (", default" if index == 0 else "")
            found.append(timed(name, ours(x, weights, tiles), count, **notes, tiles=tiles))
    if rows > 16:  # the library's least
        library = [lambda w=w: torch._int_mm(values, w.values.T) for w in weights]
        found.append(timed("torch._int_mm", library, count, **notes))
        epilogue = torch.compile(scaled, dynamic=False)
        both = [
            lambda w=w: epilogue(torch._int_mm(values, w.values.T), plain.scales, w.scales) for w in weights
        ]
        found.append(timed("torch._int_mm and epilogue", both, count, **notes))
    half, wide = values.half(), [w.values.half() for w in weights]
    dense = [lambda w=w: torch.nn.functional.linear(half, w) for w in wide]
    found.append(timed("fp16 matrix library", dense, count, **notes))
    return found


def candidates(x: Int8Rows, outputs: int, split: bool) -> list[dict[str, int]]:
    """Tiles worth timing, the default first."""
    (rows, width), device = x.values.shape, x.values.device
    if rows > MAX_ROWS:
        size, shared = torch.float16.itemsize, shared_bytes(device)
        machine = multiprocessors(device), overlaps(device), shared
        default = large_int8_tiles(rows, outputs, size, *machine, x.group)
        return large_int8_candidates(default, size, shared, x.group)
    found = small_int8_candidates(small_int8_tiles(rows, outputs, width, device, x.group, split))
    return found + [{**tiles, "SPLITS": 4} for tiles in found if split]


def ours(x: Int8Rows, weights: list[Int8Weight], tiles: dict[str, int]) -> list[Callable[[], Any]]:
    """Calls of our product; output and down products of few rows leave parts."""
    if x.values.shape[0] <= MAX_ROWS and "SPLITS" in tiles and tiles["SPLITS"] > 1:
        return [lambda w=w: int8_linear_parts(x, w, tiles) for w in weights]
    return [lambda w=w: int8_linear(x, w, torch.float16, tiles=tiles) for w in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--json", type=Path, help="file to write the list to as well")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    found: list[dict[str, Any]] = [{"gpu": torch.cuda.get_device_name(), **versions}]
    print(found[0], file=sys.stderr)
    for shape in arguments.shapes:
        for rows in arguments.rows:
            table = measure(shape, rows)
            for row in sorted(table, key=lambda row: row.get("us", float("inf"))):
                print(row, file=sys.stderr, flush=True)
            found += table
    if arguments.json:
        arguments.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
