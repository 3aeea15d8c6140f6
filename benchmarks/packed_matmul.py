"""Products of 9 to 512 rows with weights of 8 and of 4 bits: tiles of the kernel that unpacks them in
registers, and the matrix library.

Every candidate of ``kernels/tiles/packed_tiles.py`` at every shape of a 7B model, in microseconds (median of
CUDA graph replays over more weights than L2 holds). Beside it what it replaces, the widened weight and the
matrix library's product, and the library's product of an fp16 weight. Output and down products leave parts of
their sums; the library's ends whole. Kernels are compiled by all cores first. A line a case says what is
best.

    python benchmarks/packed_matmul.py --json docs/results/packed_matmul.json
    python benchmarks/packed_matmul.py --rows 128 256 --bits 4 --shapes gate_up
    python benchmarks/packed_matmul.py --dry                               # tiny, on a CPU: no figures
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch
import torch.multiprocessing
import torch.nn.functional as F
import triton

sys.path.insert(0, str(Path(__file__).parent))
from narrow_variants import narrow_weight
from product_candidates import packed_candidates
from timing import compact, graph_us

from ingot.kernels.product.packed.packed_matmul import packed_matmul, packed_matmul_parts
from ingot.kernels.rows.operand_rows import operand_rows
from ingot.kernels.weight.dequantize import dequantize
from ingot.kernels.weight.stored_weight import StoredWeight

ROWS = (96, 128, 192, 256, 384, 512)
SHAPES = {"qkv": (12288, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)}
TINY = {"qkv": (96, 256), "o": (64, 256), "gate_up": (96, 256), "down": (64, 512)}
SPLIT = ("o", "down")  # sum_norm adds up their parts
COPIES_BYTES = 256 << 20  # of weights in turn, so that none comes from L2
REPEATS = 9

Tiles = dict[str, int]
Call = Callable[[], Any]


def ours(x: torch.Tensor, weights: list[StoredWeight], tiles: Tiles, split: bool) -> list[Call]:
    """A call a weight, with x in the operand's order where words go straight into registers."""
    rows = operand_rows(x) if tiles["DIRECT"] else x
    if split:
        return [lambda w=w: packed_matmul_parts(rows, w, tiles) for w in weights]
    return [lambda w=w: packed_matmul(rows, w, None, tiles) for w in weights]


def copies(outputs: int, width: int, bits: int, dry: bool) -> list[StoredWeight]:
    """Weights of more bytes than L2 holds."""
    if dry:
        return [narrow_weight(outputs, width, bits, "cpu")]
    count = -(-COPIES_BYTES // (outputs * width * bits // 8))
    return [narrow_weight(outputs, width, bits, "cuda") for _ in range(count)]


def timed(calls: list[Call], dry: bool) -> float | str:
    """Microseconds of one call, or why there are none."""
    try:
        if dry:
            calls[0]()
            return 0.0
        return statistics.median(graph_us(calls, REPEATS)) / len(calls)
    except Exception as error:  # tiles that do not fit: a row as well
        if not dry:
            torch.cuda.synchronize()
        return f"{type(error).__name__}: {error}"[:200]


def compile_share(rank: int, ranks: int, cases: list[tuple[str, int, int]]) -> None:
    """Launch one in ``ranks`` of all candidates once, so that its kernel is on disk."""
    held: dict[tuple[str, int], StoredWeight] = {}
    jobs = []
    for shape, bits, rows in cases:
        if (shape, bits) not in held:
            held[shape, bits] = narrow_weight(*SHAPES[shape], bits, "cuda")
        weight = held[shape, bits]
        tiles_of = packed_candidates(rows, weight, weight.values.device, shape in SPLIT)
        jobs += [(shape, weight, rows, tiles) for tiles in tiles_of]
    for shape, weight, rows, tiles in jobs[rank::ranks]:
        x = torch.zeros(rows, weight.in_features, dtype=torch.float16, device="cuda")
        try:
            ours(x, [weight], tiles, shape in SPLIT)[0]()
            torch.cuda.synchronize()
        except Exception:
            continue  # more shared memory or registers than there are: the table says so


def measure(
    shape: str, bits: int, rows: int, weights: list[StoredWeight], wide: list[torch.Tensor], dry: bool
) -> dict[str, Any]:
    """All ways of one product."""
    split = shape in SPLIT
    device = weights[0].values.device
    x = torch.randn(rows, weights[0].in_features, dtype=torch.float16, device=device)
    candidates = packed_candidates(rows, weights[0], device, split)[: 2 if dry else None]
    found = [{"tiles": tiles, "us": timed(ours(x, weights, tiles, split), dry)} for tiles in candidates]
    widened: list[Call] = [lambda w=w: F.linear(x, dequantize(w, x.dtype)) for w in weights]
    dense: list[Call] = [lambda w=w: F.linear(x, w) for w in wide]
    fits = [row for row in found if isinstance(row["us"], float)]
    best = min(fits, key=lambda row: row["us"], default=None)
    row = {
        "shape": shape,
        "bits": bits,
        "rows": rows,
        "default_us": found[0]["us"],
        "best_us": best and best["us"],
        "best": best and best["tiles"],
        "widened_us": timed(widened, dry),
        "fp16_us": timed(dense, dry),
        "candidates": found,
    }
    figures = " ".join(f"{name} {row[name + '_us']!s:.6}" for name in ("default", "best", "widened", "fp16"))
    print(
        f"{bits} bits {shape:8}{rows:4} rows: {figures} | {compact(best['tiles']) if best else ''}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes under Triton's interpreter: no figures"
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.dry:
        SHAPES.update(TINY)
        given.rows = given.rows[:1]
    cases = [(shape, bits, rows) for shape in given.shapes for bits in given.bits for rows in given.rows]
    if not given.dry:
        begun, ranks = time.perf_counter(), max((os.cpu_count() or 2) - 1, 1)
        torch.multiprocessing.spawn(compile_share, (ranks, cases), nprocs=ranks)
        print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    found = []
    for shape in given.shapes:
        size = SHAPES[shape]
        count = 1 if given.dry else -(-COPIES_BYTES // (size[0] * size[1] * 2))
        device = "cpu" if given.dry else "cuda"
        wide = [torch.randn(size, dtype=torch.float16, device=device) / size[1] ** 0.5 for _ in range(count)]
        for bits in given.bits:
            weights = copies(*size, bits, given.dry)
            found += [measure(shape, bits, rows, weights, wide, given.dry) for rows in given.rows]
    if given.json:
        results = {
            "command": shlex.join(["python", *sys.argv]),
            "gpu": "none" if given.dry else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cases": found,
        }
        given.json.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
