"""Products in e4m3 by blocks of 128 x 128, beside those by rows and channels: errors, steps, prompts.

A layer of a decode step is that of fp8_layer.py; shapes are those of an 8B model (Llama 3.1). Microseconds
are medians of CUDA graph replays over weights in turn. Data are random; outputs are filled with NaN before
they are checked against fp64.

    python benchmarks/fp8_blocks.py --seconds 100 --json fp8_blocks.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fp8_layer
import int8_products
import torch
import triton
from fp8_layer import FULL, LAYERS, PARTS
from fp8_products import SHAPES

from ingot.kernels.activation.silu_mul_int8 import quantized, silu_mul_int8
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.product.int8.int8_matmul import int8_matmul_triton
from ingot.kernels.rows.int8_rows import BLOCK, E4M3, Int8Rows, Int8Weight, quantize_rows
from ingot.kernels.rows.row_endings import InInt8

BRAIN = torch.bfloat16
LARGE = ("BLOCK_M", "BLOCK_N", "MORE_N", "BLOCK_K", "num_warps", "num_stages", "PIECES", "PROGRAMS")
TRIED = (
    (128, 128, 0, 128, 8, 4, 1, 1), (128, 128, 0, 128, 8, 4, 2, 1), (128, 128, 0, 128, 8, 3, 1, 1),
    (64, 128, 0, 128, 4, 3, 1, 2), (64, 128, 0, 128, 4, 4, 1, 2), (128, 64, 0, 128, 4, 4, 1, 2),
    (128, 128, 0, 128, 4, 3, 2, 2), (256, 64, 0, 128, 8, 4, 1, 1), (256, 128, 0, 128, 8, 3, 2, 1),
    (128, 128, 0, 128, 8, 4, 1, 0), (64, 128, 0, 128, 4, 4, 1, 3),
)  # fmt: skip
FEW = {
    8: ((64, 128, 4, 8, 2, 0, 16), (64, 128, 4, 8, 2, 1, 16), (64, 128, 4, 8, 3, 0, 16),
        (64, 128, 4, 6, 0, 1, 16)),
    64: ((64, 128, 4, 5, 2, 0, 64), (64, 128, 4, 5, 3, 0, 64), (128, 128, 8, 4, 1, 0, 64),
         (64, 128, 4, 4, 4, 0, 64)),
}  # fmt: skip
FEW_PARTS = {
    8: ((64, 128, 4, 8, 0, 0, 16, 4), (64, 128, 4, 8, 0, 1, 16, 4), (64, 128, 4, 8, 0, 0, 16, 8),
        (64, 128, 4, 8, 0, 1, 16, 8)),
    64: ((64, 128, 4, 5, 0, 0, 64, 4), (128, 128, 4, 4, 0, 0, 64, 8), (64, 128, 4, 4, 0, 0, 64, 8)),
}  # fmt: skip


COMPILING = False  # then everything runs once, untimed, so that processes can compile side by side


def timed(run: Callable[[], Any], replays: int) -> float:
    """Microseconds per layer."""
    if COMPILING:
        run()
        torch.cuda.synchronize()
        return 1.0
    return fp8_layer.timed(run, replays)


def microseconds(calls: list[Callable[[], Any]], replays: int) -> float:
    """Microseconds per call."""
    return 1.0 if COMPILING else int8_products.microseconds(calls, replays)


def in_blocks(outputs: int, width: int) -> Int8Weight:
    """A random weight with a scale per block."""
    plain = torch.randn(outputs, width, device="cuda") * torch.rand(outputs, 1, device="cuda").add(0.5)
    pieces = plain.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = pieces.abs().amax((1, 3)) / 448
    values = (pieces / scales[:, None, :, None]).to(E4M3).flatten(2).flatten(0, 1)
    return Int8Weight(values, scales / width**0.5)


def by_channel(outputs: int, width: int) -> Int8Weight:
    """A random weight with a scale per output."""
    found = quantize_rows(torch.randn(outputs, width, device="cuda", dtype=BRAIN), dtype=E4M3)
    return Int8Weight(found.values, found.scales / width**0.5)


def truth(x: Int8Rows, weight: Int8Weight) -> torch.Tensor:
    """fp64, of values and scales."""
    wide = x.values.double() * x.scales.double().repeat_interleave(x.group, 1)
    scales = (
        weight.scales.double().repeat_interleave(BLOCK, 0)[: len(weight.values)].repeat_interleave(BLOCK, 1)
    )
    return wide @ (weight.values.double() * scales).T


def off(y: torch.Tensor, expected: torch.Tensor) -> float:
    difference = y.double() - expected
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())


def checks() -> Iterator[dict[str, Any]]:
    """Errors of whole products and of parts, relative to the outputs' RMS (bf16 rounding alone: 0.0017)."""
    for outputs, width in ((6144, 4096), (4096, 14336), (320, 256)):
        weight = (
            in_blocks(outputs, width)
            if outputs % BLOCK == 0
            else Int8Weight(*(lambda w: (w.values[:outputs], w.scales))(in_blocks(384, width)))
        )
        for rows in (1, 8, 33, 64, 65, 256, 1000):
            x = quantize_rows(torch.randn(rows, width, device="cuda") * 3, BLOCK, dtype=E4M3)
            expected = truth(x, weight)
            out = torch.full((rows, outputs), torch.nan, device="cuda", dtype=BRAIN)
            row = {"check": [rows, outputs, width], "bf16": off(expected.bfloat16(), expected)}
            row["off"] = off(int8_linear(x, weight, BRAIN, out=out), expected)
            row["full"] = off(int8_linear(x, weight, torch.float32), expected)
            if rows <= 256:
                row["parts"] = off(int8_linear_parts(x, weight).sum(0), expected)
            yield row
    x = torch.randn(100, 28672, device="cuda", dtype=BRAIN)
    norm = torch.randn(4096, device="cuda", dtype=BRAIN)
    hidden, ending = x[:, :4096].contiguous(), InInt8(dtype=E4M3, group=BLOCK)
    pairs = {
        "norm": (rms_norm(hidden, norm, 1e-6, ending=ending)[0], rms_norm(hidden, norm, 1e-6)[0]),
        "silu": (silu_mul_int8(x, dtype=E4M3, group=BLOCK), None),
    }
    plain = torch.nn.functional.silu(x[:, :14336].float()).bfloat16() * x[:, 14336:]
    for name, (got, wide) in pairs.items():
        want = quantized(plain if wide is None else wide, BLOCK, dtype=E4M3)
        ref = quantize_rows(plain if wide is None else wide, BLOCK, dtype=E4M3)
        yield {
            "ending": name,
            "as the separate kernel": float((got.values.float() == want.values.float()).float().mean()),
            "as PyTorch": float((want.values.float() == ref.values.float()).float().mean()),
            "scales": float((got.scales == want.scales).float().mean()),
        }


class Layers:
    """Weights of some layers, and their decode steps."""

    def __init__(self, make: Callable[[int, int], Int8Weight], group: int) -> None:
        self.group = group
        self.weights = [{name: make(*shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
        self.norm = torch.ones(4096, device="cuda", dtype=BRAIN)

    def step(self, rows: int, tiles: dict[str, dict[str, int]]) -> Callable[[], Any]:
        ending, early = InInt8(dtype=E4M3, group=self.group), {"OVERLAP": 2}
        start = torch.randn(rows, 4096, device="cuda", dtype=BRAIN)
        attended = [torch.randn(rows, 4096, device="cuda", dtype=BRAIN) for _ in range(LAYERS)]

        def run() -> torch.Tensor:
            x, hidden = rms_norm(start, self.norm, 1e-6, start, early, ending)
            for index, layer in enumerate(self.weights):
                int8_linear(x, layer["qkv"], BRAIN, tiles=tiles.get("qkv"))
                x = quantized(attended[index], self.group, dtype=E4M3)
                parts = int8_linear_parts(x, layer["o"], tiles.get("o"))
                x, hidden = sum_norm(parts, hidden, self.norm, 1e-6, None, early, ending)
                inner = int8_linear(x, layer["gate_up"], BRAIN, tiles=tiles.get("gate_up"))
                x = silu_mul_int8(inner, dtype=E4M3, group=self.group)
                parts = int8_linear_parts(x, layer["down"], tiles.get("down"))
                x, hidden = sum_norm(parts, hidden, self.norm, 1e-6, None, early, ending)
            return hidden

        return run


def decodes(rows: int, tried: bool) -> Iterator[dict[str, Any]]:
    """A layer of a step: by channel, in blocks, and in blocks with other tiles of one product."""
    sides = {"channel": Layers(by_channel, 0), "blocks": Layers(in_blocks, BLOCK)}
    for name, layers in sides.items():
        yield {
            "rows": rows,
            "kind": name,
            "tiles": "default",
            "us": round(timed(layers.step(rows, {}), 25), 2),
        }
    near = 8 if rows <= 16 else 64
    for products, names, choices in (
        (("gate_up", "qkv"), FULL, FEW[near]),
        (("down", "o"), PARTS, FEW_PARTS[near]),
    ):
        for product in products if tried else ():
            for choice in choices:
                row: dict[str, Any] = {"rows": rows, "kind": "blocks", "tiles": f"{product} {choice}"}
                try:
                    run = sides["blocks"].step(rows, {product: dict(zip(names, choice, strict=True))})
                    row["us"] = round(timed(run, 15), 2)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:160]
                yield row


def library_ways(x: Int8Rows, weight: Int8Weight) -> dict[str, Callable[[], torch.Tensor]]:
    """The matrix library's product by blocks, with scales in several layouts."""
    rows = x.scales.t().contiguous().t()
    padded = -(-weight.scales.shape[1] // 4) * 4
    spread = weight.scales.new_zeros(len(weight.scales), padded)
    spread[:, : weight.scales.shape[1]] = weight.scales
    cut = spread[:, : weight.scales.shape[1]]

    def way(b: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: torch._scaled_mm(x.values, weight.values.t(), scale_a=rows, scale_b=b, out_dtype=BRAIN)

    def newer() -> torch.Tensor:
        from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

        return scaled_mm(
            x.values, weight.values.t(), rows, ScalingType.BlockWise1x128, cut, ScalingType.BlockWise128x128,
            swizzle_a=SwizzleType.NO_SWIZZLE, swizzle_b=SwizzleType.NO_SWIZZLE, output_dtype=BRAIN,
        )  # fmt: skip

    return {"t": way(cut.t()), "plain": way(cut), "tc": way(cut.t().contiguous()), "newer": newer}


def many(shape: str, rows: int, tried: bool) -> Iterator[dict[str, Any]]:
    """All ways of a product of many rows."""
    outputs, width = SHAPES[shape]
    plain = torch.randn(rows, width, device="cuda", dtype=BRAIN)
    x, whole = quantize_rows(plain, BLOCK, dtype=E4M3), quantize_rows(plain, dtype=E4M3)
    weights = [in_blocks(outputs, width) for _ in range(4)]
    channels = [by_channel(outputs, width) for _ in range(4)]
    first = Int8Rows(x.values[:64], x.scales[:64], BLOCK)
    expected = truth(first, weights[0])
    ways: dict[str, list[Callable[[], Any]]] = {
        "channel": [lambda w=w: int8_linear(whole, w, BRAIN) for w in channels],
        "blocks": [lambda w=w: int8_linear(x, w, BRAIN) for w in weights],
    }
    for name in library_ways(x, weights[0]):
        ways[f"library {name}"] = [library_ways(x, w)[name] for w in weights]
    for choice in TRIED if tried else ():
        tiles = dict(zip(LARGE, choice, strict=True))
        ways[str(choice)] = [lambda w=w, t=tiles: int8_matmul_triton(x, w, BRAIN, tiles=t) for w in weights]
    for name, calls in ways.items():
        row: dict[str, Any] = {"shape": shape, "rows": rows, "way": name}
        try:
            y = calls[0]()
            row["off"] = round(off(y[:64], expected), 5) if name != "channel" else None
            row["us"] = round(microseconds(calls, 9), 2)
            row["tflops"] = round(2 * rows * outputs * width / row["us"] / 1e6, 1)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:250]
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--compile", action="store_true", help="run everything once, to fill Triton's cache")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the parts to run")
    parser.add_argument("--tried", action="store_true", help="other tiles, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    global COMPILING
    COMPILING = arguments.compile
    torch.manual_seed(0)
    end = time.monotonic() + arguments.seconds
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                              "triton": triton.__version__, "rows": []}  # fmt: skip
    print(result, flush=True)
    tried = arguments.tried
    jobs: list[Callable[[], Iterator[dict[str, Any]]]] = [
        checks,
        lambda: decodes(1, tried),
        lambda: many("qkv", 4096, tried),
        lambda: decodes(8, False),
        lambda: decodes(64, tried),
        lambda: many("gate_up", 4096, False),
        lambda: many("down", 4096, False),
        lambda: many("o", 4096, False),
        lambda: decodes(32, False),
        lambda: many("qkv", 512, tried),
    ]
    for job in [jobs[i] for i in arguments.only] if arguments.only else jobs:
        try:
            for row in job():
                result["rows"].append(row)
                print(f"{time.monotonic() - end + arguments.seconds:.0f}", row, flush=True)
                if time.monotonic() > end:
                    break
        except Exception as error:
            print("failed", repr(error)[:300], flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1))
        torch.cuda.empty_cache()
        if time.monotonic() > end:
            break


if __name__ == "__main__":
    main()
