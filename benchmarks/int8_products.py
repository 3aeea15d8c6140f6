"""Products of numbers of 8 bits, ours by tiles and the matrix library's, at the shapes of a 7B model.

Every candidate of ``kernels/tiles/int8_tiles.py`` at every shape: microseconds (median of CUDA graph
replays), TOPS and % of the GPU's dense int8 ceiling. Beside it ``torch._int_mm`` alone and with the epilogue
that our kernels have inside (scales, to 16 bits), compiled by PyTorch, and the fp16 product. Data are random:
zeros draw less power and run faster. One JSON list on the last line.

    python benchmarks/int8_products.py                        # all; some minutes
    python benchmarks/int8_products.py --rows 2048 4096 --shapes qkv gate_up
    python benchmarks/int8_products.py --quick                # below a minute

``--quick`` times what a decode step of 128 and of 256 rows makes of its output and down products: parts and
the norm that adds them up, by the tiles that are expected to be near the best, and beside them the whole
product and its norm. One line each on stderr, the best tiles first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from product_candidates import large_int8_candidates, small_int8_candidates
from timing import graph_us

from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight
from ingot.kernels.rows.row_endings import InInt8
from ingot.kernels.tiles.int8_tiles import (
    DECODE_ROWS,
    busiest_bytes,
    large_int8_tiles,
    machine_of,
    small_int8_tiles,
)
from ingot.kernels.tiles.product_tiles import MAX_ROWS

ROWS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
SHAPES = {"qkv": (12288, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)}
CEILING_TOPS = 1979.0  # an H200's tensor cores, int8 without sparsity, by its data sheet
COPIES_BYTES = 256 << 20  # of weights in turn, so that none comes from L2
HEAD_DIM = 128
SPLIT = ("o", "down")  # those whose sums decode steps split
QUICK_ROWS = (128, 256)
QUICK_SECONDS = 50  # what is not timed by then is counted instead
NEAR = 1.25  # of the best estimate: tiles that --quick times


def numbers(*shape: int) -> torch.Tensor:
    """Random numbers of 8 bits, as normal activations and weights have them."""
    return (torch.randn(shape, device="cuda") * 40).round().clamp(-127, 127).to(torch.int8)


def microseconds(calls: list[Callable[[], Any]], replays: int = 15) -> float:
    """Median of graph replays of the calls one after another, for one call."""
    return graph_us(calls, replays)[replays // 2] / len(calls)


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


def weights_of(shape: str) -> list[Int8Weight]:
    """Weights in turn."""
    outputs, width = SHAPES[shape]
    copies = max(1, min(COPIES_BYTES // (outputs * width), 8))
    return [Int8Weight(numbers(outputs, width), torch.rand(outputs, device="cuda")) for _ in range(copies)]


def rows_of(shape: str, rows: int) -> list[Int8Rows]:
    """Activations with a scale a row; those of the output product also as attention leaves them, by heads."""
    width = SHAPES[shape][1]
    values = numbers(rows, width)
    plain = Int8Rows(values, torch.rand(rows, device="cuda"))
    if shape != "o":
        return [plain]
    return [plain, Int8Rows(values, torch.rand(rows, width // HEAD_DIM, device="cuda"), HEAD_DIM)]


def measure(shape: str, rows: int) -> list[dict[str, Any]]:
    """All ways of one product."""
    outputs, width = SHAPES[shape]
    weights, forms = weights_of(shape), rows_of(shape, rows)
    values, plain = forms[0].values, forms[0]
    torch.cuda.synchronize()
    count, notes = 2 * rows * outputs * width, {"shape": shape, "rows": rows}
    found = []
    for x in forms:
        kind = "groups" if x.group else "rows"
        for index, tiles in enumerate(candidates(x, outputs, shape in SPLIT)):
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
        split = split and rows <= DECODE_ROWS
        size, machine = torch.int32.itemsize if split else torch.float16.itemsize, machine_of(device)
        default = large_int8_tiles(rows, outputs, width, size, machine, x.group, split=split)
        return large_int8_candidates(default, size, machine.shared, x.group, split)
    found = small_int8_candidates(small_int8_tiles(rows, outputs, width, device, x.group, split))
    return found + [{**tiles, "SPLITS": 4} for tiles in found if split]


def ours(x: Int8Rows, weights: list[Int8Weight], tiles: dict[str, int]) -> list[Callable[[], Any]]:
    """Calls of our product; output and down products of a decode step leave parts."""
    if tiles["SPLITS"] > 1:
        return [lambda w=w: int8_linear_parts(x, w, tiles) for w in weights]
    return [lambda w=w: int8_linear(x, w, torch.float16, tiles=tiles) for w in weights]


def quick(shape: str, rows: int, end: float) -> list[dict[str, Any]]:
    """Product and norm of a decode step, in parts and whole, until the time ``end``."""
    outputs, width = SHAPES[shape]
    x, weights = rows_of(shape, rows)[-1], weights_of(shape)
    stream = torch.randn(rows, outputs, device="cuda", dtype=torch.float16)
    norm, machine = torch.ones(outputs, device="cuda", dtype=torch.float16), machine_of(stream.device)
    torch.cuda.synchronize()
    count, notes = 2 * rows * outputs * width, {"shape": shape, "rows": rows}

    def whole(w: Int8Weight) -> Any:
        return rms_norm(int8_linear(x, w, torch.float16, None, stream), norm, 1e-6, ending=InInt8())

    def parts(w: Int8Weight, tiles: dict[str, int]) -> Any:
        return sum_norm(int8_linear_parts(x, w, tiles), stream, norm, 1e-6, ending=InInt8())

    tried = [
        (tiles, busiest_bytes(tiles, rows, outputs, width, x.group, machine))
        for tiles in candidates(x, outputs, True)
    ]
    least = min(size for _, size in tried)
    near = [tiles for tiles, size in tried if size <= NEAR * least]
    found = [timed("whole and norm", [lambda w=w: whole(w) for w in weights], count, **notes)]
    for tiles in near:
        if time.monotonic() < end:
            calls = [lambda w=w, tiles=tiles: parts(w, tiles) for w in weights]
            found.append(timed("parts and norm", calls, count, **notes, tiles=tiles))
    print(line_of(found, len(near) + 1 - len(found)), file=sys.stderr, flush=True)
    return found


def line_of(found: list[dict[str, Any]], missing: int) -> str:
    """The whole product's time, the default's, and the best three tiles."""
    whole, *parts = found
    best = sorted(parts, key=lambda row: row.get("us", float("inf")))[:3]
    shown = ", ".join(f"{row.get('us')} by {tiles_of(row['tiles'])}" for row in best)
    default = parts[0].get("us") if parts else None
    rest = f"; {missing} not timed" if missing else ""
    place = f"{whole['shape']} {whole['rows']} rows"
    return f"{place}, µs: whole {whole.get('us')}, default {default}; {shown}{rest}"


def tiles_of(tiles: dict[str, int]) -> str:
    """Tiles in short."""
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    m, n, k, warps, stages = (tiles[name] for name in names)
    return f"{m}x{n}x{k} {warps}w {stages}s /{tiles['SPLITS']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--quick", action="store_true", help="decode steps of 128 and 256 rows, parts alone")
    parser.add_argument("--json", type=Path, help="file to write the list to as well")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    found: list[dict[str, Any]] = [{"gpu": torch.cuda.get_device_name(), **versions}]
    print(found[0], file=sys.stderr)
    end = time.monotonic() + QUICK_SECONDS
    for shape, rows in itertools.product(SPLIT, QUICK_ROWS) if arguments.quick else ():
        found += quick(shape, rows, end)
    for shape in () if arguments.quick else arguments.shapes:
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
