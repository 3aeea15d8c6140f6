"""Products in 8 bits by groups of warps beside those of the other kernels, by every choice of tiles (Hopper).

Per cell one CUDA graph of products over three or four weights: the median of seven replays, and the mean of
0.3 s of replays (``sustained``).

    python benchmarks/int8_warpgroups.py --json int8_warpgroups.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import captured

from ingot.kernels.product.few_rows.small_int8 import small_int8_linear_triton, small_int8_parts_triton
from ingot.kernels.product.int8.int8_matmul import int8_matmul_parts_triton, int8_matmul_triton
from ingot.kernels.product.int8.warpgroup_matmul import (
    takes_warpgroups,
    warpgroup_matmul_triton,
    warpgroup_parts_triton,
)
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight
from ingot.kernels.tiles.int8_tiles import DECODE_ROWS, FEW_PARTS, PARTS, machine_of
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.tiles.warpgroup_tiles import rated
from ingot.kernels.weight.expand_int8 import whole_int8
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight

SHAPES = {  # outputs and columns of the products of a 7B (7) and of Llama-3.1-8B (8)
    "qkv7": (12288, 4096),
    "gate_up7": (22016, 4096),
    "down7": (4096, 11008),
    "qkv8": (6144, 4096),
    "gate_up8": (28672, 4096),
    "down8": (4096, 14336),
    "o": (4096, 4096),
}
HEAD = 128


def operands(
    rows: int, outputs: int, width: int, four: bool, group: int, seed: int
) -> tuple[Int8Rows, AnyInt8]:
    """Random rows and a random weight, of every value."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda", dtype=dtype)

    scales = (rows, width // group) if group else (rows,)
    x = Int8Rows(drawn(-127, 128, rows, width), torch.rand(scales, device="cuda") / 100, group)
    weight_scales = torch.rand(outputs, device="cuda") / 1000
    if not four:
        return x, Int8Weight(drawn(-127, 128, outputs, width), weight_scales)
    steps = drawn(1, 9, width // HEAD, outputs, dtype=torch.uint8)
    zeros = torch.full_like(steps, 8)
    pairs = drawn(0, 256, outputs, width // 2, dtype=torch.uint8)
    return x, Int4Weight(pairs, steps, zeros, weight_scales, HEAD, width)


def before(x: Int8Rows, weight: AnyInt8, split: bool) -> Any:
    """The product by the kernels of other GPUs."""
    rows = len(x.values)
    if split:
        many = rows > FEW_PARTS
        return int8_matmul_parts_triton(x, whole_int8(weight)) if many else small_int8_parts_triton(x, weight)
    if rows <= MAX_ROWS:
        return small_int8_linear_triton(x, weight, torch.float16)
    return int8_matmul_triton(x, whole_int8(weight), torch.float16)


def replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """µs per replay."""
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


def cell(shape: str, rows: int, four: bool, group: int) -> dict[str, Any]:
    """µs per product by each way, alone and sustained, and TOPS."""
    outputs, width = SHAPES[shape]
    split = shape in ("o", "down7", "down8") and rows <= DECODE_ROWS
    sides = [operands(rows, outputs, width, four, group, seed) for seed in range(3)]
    ways: dict[str, Callable[[Int8Rows, AnyInt8], Any]] = {"before": lambda x, w: before(x, w, split)}
    if takes_warpgroups(*sides[0]):
        machine = machine_of(sides[0][0].values.device)
        for _, tiles in rated(rows, 4 if split else 2, machine, group, four):
            for splits in PARTS[1:] if split else (1,):
                choice = tiles | {"SPLITS": splits}
                name = "groups {GROUPS} rows {BLOCK_T} programs {PROGRAMS} splits {SPLITS}".format(**choice)
                if split:
                    ways[name] = lambda x, w, c=choice: warpgroup_parts_triton(x, w, c)
                else:
                    ways[name] = lambda x, w, c=choice: warpgroup_matmul_triton(x, w, torch.float16, tiles=c)
    found: dict[str, Any] = {"shape": shape, "rows": rows, "four": four, "group": group}
    for name, way in ways.items():
        calls: list[Callable[[], Any]] = [lambda s=s, way=way: way(*s) for s in sides * 2]
        graph = captured(calls)
        alone = sorted(replays(graph, 1) for _ in range(7))[3] / len(calls)
        many = replays(graph, max(int(3e5 / (alone * len(calls))), 2)) / len(calls)
        tops = 2 * rows * outputs * width / alone / 1e6
        found[name] = {"us": round(alone, 2), "sustained_us": round(many, 2), "tops": round(tops)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 64, 128, 256, 512, 2048, 8192])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = []
    for rows in args.rows:
        for shape in SHAPES:
            for four in (False, True):
                for group in (0, HEAD) if shape == "o" else (0,):
                    cells.append(cell(shape, rows, four, group))
                    print(json.dumps(cells[-1]), flush=True)
    if args.json:
        found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": cells}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
