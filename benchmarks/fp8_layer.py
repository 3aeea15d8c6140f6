"""A layer's products, norms and activation as a decode step launches them, in int8 and in e4m3, by tiles.

One layer of an 8B model after another, each with weights of its own, in one CUDA graph: norm, QKV, the
rounding of attention's output, output parts, norm, gate and up, SiLU, down parts; attention itself is left
out. Microseconds per layer, the median of replays. Of e4m3 every product's tiles change in turn.

    python benchmarks/fp8_layer.py --rows 1 8 64 --json fp8_layer.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from fp8_products import SHAPES
from timing import graph_us

from ingot.kernels.activation.silu_mul_int8 import quantized, silu_mul_int8
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Weight, quantize_rows
from ingot.kernels.rows.row_endings import InInt8

LAYERS, HEAD_DIM = 8, 128
Tiles = dict[str, int]
FULL = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH", "BLOCK_T")
TRIED_FULL = {
    8: ((64, 256, 4, 5, 2, 0, 16), (64, 256, 4, 4, 3, 1, 16), (64, 256, 4, 4, 0, 1, 16),
        (64, 128, 4, 8, 2, 1, 16), (64, 128, 4, 8, 3, 0, 16), (32, 256, 2, 6, 0, 1, 8)),
    64: ((64, 128, 4, 5, 3, 0, 64), (128, 128, 8, 4, 1, 0, 64), (64, 256, 4, 3, 2, 0, 64),
         (64, 128, 4, 4, 4, 0, 64), (128, 128, 4, 5, 1, 0, 64)),
}  # fmt: skip
PARTS = (*FULL, "SPLITS")
TRIED_PARTS = {
    8: ((64, 256, 4, 4, 0, 1, 16, 4), (64, 256, 4, 6, 0, 0, 16, 4), (64, 256, 4, 4, 0, 0, 16, 8),
        (64, 128, 4, 8, 0, 1, 16, 8), (64, 256, 4, 4, 2, 1, 16, 4), (64, 256, 4, 6, 0, 1, 8, 4)),
    64: ((128, 128, 4, 4, 0, 0, 64, 8), (64, 128, 4, 5, 0, 0, 64, 4), (64, 256, 4, 3, 0, 0, 64, 4)),
}  # fmt: skip


class Layers:
    """Weights of some layers, and their steps."""

    def __init__(self, kind: torch.dtype) -> None:
        self.kind, self.weights = kind, []
        for _ in range(LAYERS):
            layer = {}
            for name, (outputs, width) in SHAPES.items():
                plain = torch.randn(outputs, width, device="cuda", dtype=torch.bfloat16)
                found = quantize_rows(plain, dtype=kind)
                layer[name] = Int8Weight(found.values, found.scales / width**0.5)
            self.weights.append(layer)
        self.norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def step(self, rows: int, tiles: dict[str, Tiles], attended: list[torch.Tensor]) -> Callable[[], Any]:
        """All layers of a decode step of so many rows."""
        ending, dtype = InInt8(dtype=self.kind), torch.bfloat16
        start = torch.randn(rows, 4096, device="cuda", dtype=dtype)
        early = {"OVERLAP": 2}

        def run() -> torch.Tensor:
            hidden = start
            x, hidden = rms_norm(hidden, self.norm, 1e-6, hidden, early, ending)
            for index, layer in enumerate(self.weights):
                int8_linear(x, layer["qkv"], dtype, tiles=tiles.get("qkv"))
                e4m3 = self.kind == E4M3  # of int8 attention's own kernel ends so
                x = quantized(attended[index], dtype=E4M3) if e4m3 else self.heads[index]
                parts = int8_linear_parts(x, layer["o"], tiles.get("o"))
                x, hidden = sum_norm(parts, hidden, self.norm, 1e-6, None, early, ending)
                inner = int8_linear(x, layer["gate_up"], dtype, tiles=tiles.get("gate_up"))
                parts = int8_linear_parts(
                    silu_mul_int8(inner, dtype=self.kind), layer["down"], tiles.get("down")
                )
                x, hidden = sum_norm(parts, hidden, self.norm, 1e-6, None, early, ending)
            return hidden

        if self.kind != E4M3:
            self.heads: list[Int8Rows] = [quantize_rows(one, HEAD_DIM) for one in attended]
        return run


def timed(run: Callable[[], Any], replays: int = 40) -> float:
    """Microseconds per layer."""
    return graph_us([run], replays)[replays // 2] / LAYERS


EARLIER = {  # tiles of int8 up to 8 rows, before those of 16 rows for a warpgroup's product
    1: {
        "qkv": (32, 256, 2, 6, 0, 1, 8), "gate_up": (64, 256, 4, 4, 3, 1, 8),
        "o": (64, 256, 4, 4, 0, 1, 8, 8), "down": (64, 256, 4, 6, 0, 1, 8, 4),
    },
    2: {"qkv": (64, 256, 4, 5, 2, 0, 16), "gate_up": (64, 256, 4, 5, 2, 0, 16)},
    3: {
        "qkv": (64, 256, 4, 5, 2, 0, 16), "gate_up": (64, 256, 4, 5, 2, 0, 16),
        "down": (64, 256, 4, 6, 0, 0, 16, 4),
    },
    4: {
        "qkv": (64, 256, 4, 5, 2, 0, 16), "gate_up": (64, 256, 4, 5, 2, 0, 16),
        "down": (64, 256, 4, 6, 0, 0, 16, 4), "o": (64, 256, 4, 6, 0, 0, 16, 4),
    },
}  # fmt: skip


def variants(rows: int, tried: bool) -> list[tuple[str, dict[str, Tiles]]]:
    """Tiles by product; the first are the defaults."""
    found: list[tuple[str, dict[str, Tiles]]] = [("default", {})]
    if rows <= 8:
        for number, products in EARLIER.items():
            named = {p: dict(zip(PARTS, t, strict=False)) for p, t in products.items()}
            found.append((f"set {number}", named))
    near = 8 if rows <= 16 else 64
    for name in ("gate_up", "qkv") if tried else ():
        found += [(f"{name} {t}", {name: dict(zip(FULL, t, strict=True))}) for t in TRIED_FULL[near]]
    for name in ("down", "o") if tried else ():
        found += [(f"{name} {t}", {name: dict(zip(PARTS, t, strict=True))}) for t in TRIED_PARTS[near]]
    return found


def mid(layers: dict[str, Layers], rows: int, compiling: bool) -> list[dict[str, Any]]:
    """Each product alone, of more rows: ours and the library's; output and down products with their norm."""
    found, dtype = [], torch.bfloat16
    norm = layers["e4m3"].norm
    for name, (_, width) in SHAPES.items():
        for kind, own in layers.items():
            x = quantize_rows(torch.randn(rows, width, device="cuda", dtype=dtype), dtype=own.kind)
            weights, ending = [layer[name] for layer in own.weights], InInt8(dtype=own.kind)
            hidden = torch.randn(rows, 4096, device="cuda", dtype=dtype)
            ways: dict[str, Callable[[Int8Weight], Any]] = {
                "default": lambda w, x=x: int8_linear(x, w, dtype),
                "ours": lambda w, x=x: int8_linear(x, w, dtype, tiles={"TMA": 4}),
            }
            if name in ("o", "down"):
                ways = {
                    "default and norm": lambda w, x=x, e=ending, h=hidden: rms_norm(
                        int8_linear(x, w, dtype), norm, 1e-6, h, None, e
                    ),
                    "parts and norm": lambda w, x=x, e=ending, h=hidden: sum_norm(
                        int8_linear_parts(x, w), h, norm, 1e-6, None, None, e
                    ),
                }
            for way, call in ways.items():
                row: dict[str, Any] = {"mid": name, "rows": rows, "kind": kind, "way": way}
                try:
                    call(weights[0])
                    torch.cuda.synchronize()
                    if not compiling:
                        row["us"] = round(timed(lambda c=call, ws=weights: [c(w) for w in ws], 15), 2)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:200]
                found.append(row)
                print(row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--mid", type=int, nargs="*", default=[128, 256])
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    parser.add_argument(
        "--compile", action="store_true", help="run each variant once, to fill Triton's cache"
    )
    parser.add_argument("--tried", action="store_true", help="every product's tiles in turn, too")
    parser.add_argument("--kinds", nargs="+", default=["int8", "e4m3"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    end = time.monotonic() + arguments.seconds
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                              "triton": triton.__version__, "rows": []}  # fmt: skip
    print(result, flush=True)
    kinds = {kind: Layers(E4M3 if kind == "e4m3" else torch.int8) for kind in arguments.kinds}
    for rows in arguments.rows:
        attended = [torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
        for kind, layers in kinds.items():
            for name, tiles in variants(rows, arguments.tried):
                if time.monotonic() > end:
                    break
                row: dict[str, Any] = {"rows": rows, "kind": kind, "tiles": name}
                try:
                    run = layers.step(rows, tiles, attended)
                    run()
                    torch.cuda.synchronize()
                    if not arguments.compile:
                        row["us"] = round(timed(run), 2)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:200]
                result["rows"].append(row)
                print(row, flush=True)
    for rows in arguments.mid:
        if time.monotonic() < end:
            result["rows"] += mid(kinds, rows, arguments.compile)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
