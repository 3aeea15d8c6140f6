"""What w4a8 costs a product on a GPU: the pass that writes a weight as int8, and pass and product together.

At the shapes of a 7B model, microseconds (median of CUDA graph replays) and GB/s of what the pass moves, 1.5
bytes a weight; the product after it, alone and with the pass. Weights take turns, so that none comes from L2.
One JSON list on the last line.

    python benchmarks/expand_int8.py                          # a minute or two
    python benchmarks/expand_int8.py --rows 1 64 --shapes qkv --group 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from int8_products import COPIES_BYTES, SHAPES, microseconds, numbers

from ingot.kernels.product.int8.int8_linear import int8_linear
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.weight.expand_int8 import TILES, expand_int8
from ingot.kernels.weight.int4_weight import GROUPS, Int4Weight, num_groups

ROWS = (1, 8, 64, 2048)
TRIED = (TILES, *({**TILES, "BLOCK_N": n, "TOGETHER": t} for n, t in ((16, 4), (16, 8), (64, 2), (8, 16))))


def weight_of(outputs: int, width: int, group: int) -> Int4Weight:
    """Random numbers; steps and zeros that keep them in int8."""
    groups = num_groups(width, group)
    pairs = torch.randint(0, 256, (outputs, groups * group // 2), device="cuda", dtype=torch.uint8)
    steps = torch.randint(8, 15, (groups, outputs), device="cuda", dtype=torch.uint8)
    zeros = torch.full_like(steps, 8)
    return Int4Weight(pairs, steps, zeros, torch.rand(outputs, device="cuda"), group, width)


def measure(shape: str, group: int, rows: list[int]) -> list[dict[str, Any]]:
    """The pass by tiles, then products."""
    outputs, width = SHAPES[shape]
    copies = max(2, min(2 * COPIES_BYTES // (outputs * width), 16))
    weights = [weight_of(outputs, width, group) for _ in range(copies)]
    moved, found = 1.5 * outputs * width, []
    for tiles in TRIED:
        us = microseconds([lambda w=w, t=tiles: expand_int8(w, t) for w in weights])
        notes = {"shape": shape, "group": group, "tiles": tiles}
        found.append({"name": "pass", **notes, "us": round(us, 2), "gb_s": round(moved / us / 1e3)})
    constants = [expand_int8(w) for w in weights]
    for count in rows:
        x = Int8Rows(numbers(count, width), torch.rand(count, device="cuda"))
        alone: list[Callable[[], Any]] = [lambda w=w, x=x: int8_linear(x, w, torch.half) for w in constants]
        both = [lambda w=w, x=x: int8_linear(x, expand_int8(w), torch.half) for w in weights]
        notes = {"shape": shape, "group": group, "rows": count}
        found.append({"name": "product", **notes, "us": round(microseconds(alone), 2)})
        found.append({"name": "pass and product", **notes, "us": round(microseconds(both), 2)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--group", type=int, choices=GROUPS, default=GROUPS[0])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    found: list[dict[str, Any]] = [{"gpu": torch.cuda.get_device_name(), **versions}]
    for shape in arguments.shapes:
        for row in measure(shape, arguments.group, arguments.rows):
            print(row, file=sys.stderr, flush=True)
            found.append(row)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
