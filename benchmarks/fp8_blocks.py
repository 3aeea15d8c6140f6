"""Products in e4m3 by blocks of 128 x 128, beside those by rows and channels, for the shapes of Qwen3-8B.

Errors against fp64, a layer of a decode step (that of fp8_layer.py), prompts by our kernel and by the matrix
library. Microseconds are medians of CUDA graph replays over weights in turn. Data are random; outputs are
filled with NaN before they are checked. With --parts products also each product of a decode step.

    python benchmarks/fp8_blocks.py --workers 12 --json docs/results/fp8_blocks.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from timing import graph_us

from ingot.kernels.activation.silu_mul_int8 import quantized, silu_mul_int8
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.int8.fp8_library import library_linear, library_takes
from ingot.kernels.product.int8.int8_linear import INVARIANT_FP8_TILES, int8_linear, int8_linear_parts
from ingot.kernels.rows.int8_rows import BLOCK, E4M3, Int8Rows, Int8Weight, quantize_rows
from ingot.kernels.rows.row_endings import InInt8
from ingot.kernels.tiles.product_tiles import MAX_ROWS

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
BRAIN, LAYERS, CHECKED = torch.bfloat16, 8, 64
DECODES, PROMPTS = (1, 8, 32, 64, 128), (512, 4096)
OTHER_GPUS = {"PREFETCH": 0}  # a tile of theirs, and so their kernel
Row = dict[str, Any]
Call = Callable[[], Any]


def in_blocks(outputs: int, width: int) -> Int8Weight:
    """A random weight with a scale per block."""
    whole = -(-outputs // BLOCK) * BLOCK
    plain = torch.randn(whole, width, device="cuda") * torch.rand(whole, 1, device="cuda").add(0.5)
    pieces = plain.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = pieces.abs().amax((1, 3)) / 448
    values = (pieces / scales[:, None, :, None]).to(E4M3).flatten(2).flatten(0, 1)
    return Int8Weight(values[:outputs], scales / width**0.5)


def by_channel(outputs: int, width: int) -> Int8Weight:
    """A random weight with a scale per output."""
    found = quantize_rows(torch.randn(outputs, width, device="cuda", dtype=BRAIN), dtype=E4M3)
    return Int8Weight(found.values, found.scales / width**0.5)


MAKE = {"channel": (by_channel, 0), "blocks": (in_blocks, BLOCK)}


def rounded(rows: int, width: int, group: int) -> Int8Rows:
    """Random rows as kernels leave them."""
    return quantized(torch.randn(rows, width, device="cuda", dtype=BRAIN) * 3, group, dtype=E4M3)


def off(y: torch.Tensor, x: Int8Rows, weight: Int8Weight, bias: torch.Tensor | None = None) -> float:
    """The error against fp64 of the same values, relative to the outputs' RMS, of some rows."""
    rows = slice(max(len(y) - CHECKED, 0), None)
    wide = x.values[rows].double() * x.scales[rows].double().repeat_interleave(x.group, 1)
    expected = wide @ (weight.values.double() * weight.beside().double()).T
    if bias is not None:
        expected += bias.double()
    difference = y[rows].double() - expected
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())


def checks() -> Iterator[Callable[[], Row]]:
    """Errors by our kernels and the library (bf16 rounding alone: 0.0017), and whose bits follow the rows."""
    for outputs, width in ((6144, 4096), (4096, 12288), (320, 512), (336, 1024)):
        weight = in_blocks(outputs, width)
        for rows in (8, 64, 65, 70, 257, 1000, 4096):
            if rows > 64:
                yield lambda w=weight, rows=rows: library_errors(w, rows)
            if (outputs, rows) in ((6144, 70), (6144, 1000), (320, 1000), (320, 8)):
                yield lambda w=weight, rows=rows: our_errors(w, rows)
    for name in ("library", "ours"):
        yield lambda name=name: same_bits(name)


def our_errors(weight: Int8Weight, rows: int) -> Row:
    """Of whole products and parts."""
    outputs, width = weight.values.shape
    x = rounded(rows, width, BLOCK)
    out = torch.full((rows, outputs), torch.nan, device="cuda", dtype=BRAIN)
    row: Row = {
        "check": [rows, outputs, width],
        "ours": off(int8_linear(x, weight, BRAIN, out=out), x, weight),
    }
    if rows <= 256:
        row["parts"] = off(int8_linear_parts(x, weight).sum(0), x, weight)
    return row


def same_bits(name: str) -> Row:
    """Which share of results has the same bits beside other rows."""
    x, weight, found = rounded(4096, 4096, BLOCK), in_blocks(6144, 4096), {}
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "library": library_linear,
        "ours": lambda *given: int8_linear(*given, tiles=INVARIANT_FP8_TILES),
    }
    full = ways[name](x, weight, BRAIN)
    for rows in (100, 128, 256, 512, 1000, 2048):
        own = x.scales[:rows]
        some = ways[name](Int8Rows(x.values[:rows], own, BLOCK), weight, BRAIN)
        found[rows] = float((some == full[:rows]).float().mean())
    return {"bits as in 4096 rows": name, "share": found}


def library_errors(weight: Int8Weight, rows: int) -> Row:
    """The library's error, by dtype of the result and bias."""
    x = rounded(rows, weight.values.shape[1], BLOCK)
    found: Row = {"check": [rows, *weight.values.shape], "taken": library_takes(x, weight, BRAIN)}
    for dtype in (BRAIN, torch.float16):
        for bias in (None, torch.randn(len(weight.values), device="cuda", dtype=dtype)):
            name = f"library {dtype}"[14:] + " bias" * (bias is not None)
            try:
                found[name] = off(library_linear(x, weight, dtype, bias), x, weight, bias)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


class Layers:
    """Weights of some layers, and their decode steps."""

    def __init__(self, kind: str, count: int) -> None:
        make, self.group = MAKE[kind]
        self.weights = [{name: make(*shape) for name, shape in SHAPES.items()} for _ in range(count)]
        self.norm = torch.ones(4096, device="cuda", dtype=BRAIN)

    def step(self, rows: int, tiles: Any = None) -> Call:
        ending, early = InInt8(dtype=E4M3, group=self.group), {"OVERLAP": 2}
        start = torch.randn(rows, 4096, device="cuda", dtype=BRAIN)
        attended = [torch.randn(rows, 4096, device="cuda", dtype=BRAIN) for _ in range(LAYERS)]

        def run() -> torch.Tensor:
            x, hidden = rms_norm(start, self.norm, 1e-6, start, early, ending)
            for index, layer in enumerate(self.weights):
                int8_linear(x, layer["qkv"], BRAIN, tiles=tiles)
                x = quantized(attended[index], self.group, dtype=E4M3)
                x, hidden = self.joined(x, layer["o"], hidden, ending, tiles)
                inner = int8_linear(x, layer["gate_up"], BRAIN, tiles=tiles)
                x = silu_mul_int8(inner, dtype=E4M3, group=self.group)
                x, hidden = self.joined(x, layer["down"], hidden, ending, tiles)
            return hidden

        return run

    def joined(
        self, x: Int8Rows, weight: Int8Weight, hidden: torch.Tensor, ending: InInt8, tiles: Any
    ) -> Any:
        parts = int8_linear_parts(x, weight, tiles)
        return sum_norm(parts, hidden, self.norm, 1e-6, None, {"OVERLAP": 2}, ending)


class Bench:
    """What is timed, by parts of a row that name it; weights are made once."""

    def __init__(self, count: int = LAYERS) -> None:
        self.layers = {kind: Layers(kind, count) for kind in MAKE}

    def decodes(self) -> Iterator[tuple[Row, list[Call], int]]:
        for rows in DECODES:
            for kind, layers in self.layers.items():
                yield {"layer": rows, "kind": kind}, [layers.step(rows)], LAYERS
                if kind == "blocks" and rows <= MAX_ROWS:
                    other = layers.step(rows, OTHER_GPUS)
                    yield {"layer": rows, "kind": "blocks, other GPUs"}, [other], LAYERS

    def prompts(self) -> Iterator[tuple[Row, list[Call], int]]:
        for rows in PROMPTS:
            for shape, (_, width) in SHAPES.items():
                for kind, layers in self.layers.items():
                    x = rounded(rows, width, layers.group)
                    weights = [layer[shape] for layer in layers.weights[:4]]
                    row = {"prompt": rows, "shape": shape}
                    ours = [lambda w=w, x=x: int8_linear(x, w, BRAIN, tiles={"TMA": 4}) for w in weights]
                    if kind == "blocks" and shape == "qkv":
                        yield row | {"way": "blocks, ours"}, ours, len(weights)
                    if library_takes(x, weights[0], BRAIN):
                        calls = [lambda w=w, x=x: int8_linear(x, w, BRAIN) for w in weights]
                        yield row | {"way": kind}, calls, len(weights)

    def ends(self) -> Iterator[tuple[Row, list[Call], int]]:
        """Kernels between the products."""
        norm = self.layers["blocks"].norm
        for rows in (8, 64, 4096):
            wide, x = (torch.randn(rows, n, device="cuda", dtype=BRAIN) for n in (24576, 4096))
            parts = torch.randn(4, rows, 4096, device="cuda")
            for kind, (_, group) in MAKE.items():
                ending = InInt8(dtype=E4M3, group=group)
                calls: dict[str, Call] = {
                    "silu": lambda g=group, w=wide: silu_mul_int8(w, dtype=E4M3, group=g),
                    "quantized": lambda g=group, x=x: quantized(x, g, dtype=E4M3),
                    "norm": lambda e=ending, x=x: rms_norm(x, norm, 1e-6, x, None, e),
                    "sum": lambda e=ending, x=x, p=parts: sum_norm(p, x, norm, 1e-6, None, None, e),
                }
                for name, call in calls.items():
                    yield {"end": name, "rows": rows, "kind": kind}, [call] * 8, 8

    def products(self, rows: int) -> Iterator[tuple[Row, list[Call], int]]:
        """Each product of a decode step, in blocks also by the kernel that other GPUs run."""
        for shape, (_, width) in SHAPES.items():
            split = shape in ("o", "down")
            for kind, layers in self.layers.items():
                x, weights = rounded(rows, width, layers.group), [layer[shape] for layer in layers.weights]

                def calls(tiles: Any, x: Any = x, weights: Any = weights, split: bool = split) -> list[Call]:
                    if split:
                        return [lambda w=w: int8_linear_parts(x, w, tiles) for w in weights]
                    return [lambda w=w: int8_linear(x, w, BRAIN, tiles=tiles) for w in weights]

                row = {"decode": rows, "shape": shape}
                yield row | {"way": kind}, calls(None), LAYERS
                if kind == "blocks" and rows <= MAX_ROWS:
                    yield row | {"way": "blocks, other GPUs"}, calls(OTHER_GPUS), LAYERS

    def cases(self, parts: Sequence[str]) -> Iterator[tuple[Row, list[Call], int]]:
        """Those of some parts."""
        if "layers" in parts:
            yield from self.decodes()
        if "prompts" in parts:
            yield from self.prompts()
        if "products" in parts:
            for rows in DECODES:
                yield from self.products(rows)
        if "ends" in parts:
            yield from self.ends()


def timed(row: Row, calls: list[Call], count: int) -> Row:
    try:
        row["us"] = round(graph_us(calls, 15)[7] / count, 2)
        if "prompt" in row:
            outputs, width = SHAPES[row["shape"]]
            row["tflops"] = round(2 * row["prompt"] * outputs * width / row["us"] / 1e6, 1)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:200]
    return row


def compiled(share: int, workers: int, parts: Sequence[str]) -> None:
    """Run every workers-th case once, to fill Triton's cache."""
    calls = [calls[0] for _, calls, _ in Bench(1).cases(parts)]
    for call in [*calls, *(checks() if "checks" in parts else ())][share::workers]:
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            print(repr(error)[:200], flush=True)


def summary(rows: list[Row]) -> Row:
    """The figures that pages cite."""
    found: Row = {"layer_us": {}, "tflops": {}, "prompt_us": {}, "decode_us": {}, "decode_sum_us": {}}
    for row in rows:
        if "us" not in row or "end" in row:
            continue
        if "layer" in row:
            found["layer_us"].setdefault(str(row["layer"]), {})[row["kind"].replace(", ", "_")] = row["us"]
            continue
        if "decode" in row:
            sums = found["decode_sum_us"].setdefault(str(row["decode"]), {})
            way = row["way"].replace(", ", "_")
            sums[way] = round(sums.get(way, 0) + row["us"], 2)
        unit, count = ("prompt_us", row["prompt"]) if "prompt" in row else ("decode_us", row["decode"])
        way = row["way"].replace(", ", "_")
        found[unit].setdefault(str(count), {}).setdefault(row["shape"], {})[way] = row["us"]
        if "tflops" in row:
            own = found["tflops"].setdefault(str(count), {}).setdefault(row["shape"], {})
            own[way] = row["tflops"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile first, side by side")
    parser.add_argument("--compile", action="store_true", help="only fill Triton's cache")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--parts", nargs="+", default=["prompts", "layers", "checks"], help="also: products, ends"
    )
    parser.add_argument("--commit", default="", help="of the code, for the record")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.share is not None:
        compiled(given.share, given.workers, given.parts)
        return
    end = time.monotonic() + given.seconds
    command = [sys.executable, __file__, "--workers", str(given.workers), "--parts", *given.parts]
    for worker in [subprocess.Popen([*command, "--share", str(n)]) for n in range(given.workers)]:
        worker.wait()
    if given.compile:
        return
    result: Row = {"command": shlex.join(["python", *sys.argv]), "commit": given.commit}
    result |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(result, flush=True)
    rows: list[Row] = []

    def noted(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)
        if given.json:
            given.json.write_text(json.dumps(result | summary(rows) | {"rows": rows}, indent=1) + "\n")

    for row, calls, count in Bench().cases(given.parts):
        if time.monotonic() < end:
            noted(timed(row, calls, count))
    for check in checks() if "checks" in given.parts else ():
        if time.monotonic() < end:
            try:
                noted(check())
            except Exception as error:
                noted({"check": repr(error)[:300]})


if __name__ == "__main__":
    main()
