"""Products in e4m3 by scales of rows and channels: the matrix library's and ours, beside int8 and bf16.

The shapes are those of an 8B model (Llama 3.1). Microseconds (median of CUDA graph replays over weights in
turn), TFLOP/s, and the error against fp64 of the same quantized values, relative to the outputs' RMS (bf16
rounding alone: 0.0017). Data are random. One JSON object on the last line.

    python benchmarks/fp8_products.py --json fp8.json
    python benchmarks/fp8_products.py --shapes o down --rows 64 4096
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from int8_products import microseconds

from ingot.kernels.activation.silu_mul_int8 import silu_mul_int8
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.product.int8.int8_matmul import int8_matmul_triton
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Weight, quantize_rows
from ingot.kernels.rows.row_endings import InInt8

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (64, 512, 2048, 4096, 8192)
FEW = (1, 8, 16, 32, 64)
COPIES_BYTES = 192 << 20  # of weights in turn, so that none comes from L2
CHECKED = 64  # rows that are compared with fp64
FAST = {  # tiles of sums that stay in the tensor cores
    "128x128x128 4w 2p": {"BLOCK_M": 128, "BLOCK_N": 128, "MORE_N": 0, "BLOCK_K": 128, "num_warps": 4,
                          "num_stages": 3, "PIECES": 2, "PROGRAMS": 2},
    "128x256x128 8w 1p": {"BLOCK_M": 128, "BLOCK_N": 256, "MORE_N": 0, "BLOCK_K": 128, "num_warps": 8,
                          "num_stages": 4, "PIECES": 2, "PROGRAMS": 1},
    "256x128x128 8w 1p": {"BLOCK_M": 256, "BLOCK_N": 128, "MORE_N": 0, "BLOCK_K": 128, "num_warps": 8,
                          "num_stages": 3, "PIECES": 2, "PROGRAMS": 1},
}  # fmt: skip
EXACT = {  # of sums that join fp32 registers every 128 columns
    "128x128x128 8w 1p": {"BLOCK_M": 128, "BLOCK_N": 128, "MORE_N": 0, "BLOCK_K": 128, "num_warps": 8,
                          "num_stages": 4, "PIECES": 1, "PROGRAMS": 1},
    "128x128x256 8w 1p": {"BLOCK_M": 128, "BLOCK_N": 128, "MORE_N": 0, "BLOCK_K": 256, "num_warps": 8,
                          "num_stages": 2, "PIECES": 2, "PROGRAMS": 1},
    "64x128x128 4w 2p": {"BLOCK_M": 64, "BLOCK_N": 128, "MORE_N": 0, "BLOCK_K": 128, "num_warps": 4,
                         "num_stages": 4, "PIECES": 1, "PROGRAMS": 2},
}  # fmt: skip


class Case:
    """One shape and number of rows: the same values in bf16, e4m3 and int8."""

    compiling = False  # then every product runs once, untimed: processes can compile side by side

    def __init__(self, shape: str, rows: int, copies: int | None = None) -> None:
        self.outputs, self.width = SHAPES[shape]
        self.rows, self.notes = rows, {"shape": shape, "rows": rows}
        self.copies = copies or max(2, min(COPIES_BYTES // (self.outputs * self.width), 8))
        self.dense = torch.randn(rows, self.width, device="cuda", dtype=torch.bfloat16)
        self.fp8 = quantize_rows(self.dense, dtype=E4M3)
        self.int8 = quantize_rows(self.dense)
        self.groups = quantize_rows(self.dense, 128, dtype=E4M3)
        self.groups8 = quantize_rows(self.dense, 128)
        self.plain, self.weights, self.weights8 = [], [], []
        for _ in range(self.copies):
            weight = torch.randn(self.outputs, self.width, device="cuda", dtype=torch.bfloat16)
            self.plain.append(weight)
            for kind, kept in ((E4M3, self.weights), (torch.int8, self.weights8)):
                found = quantize_rows(weight, dtype=kind)
                kept.append(Int8Weight(found.values, found.scales))
            del found, weight
        torch.cuda.synchronize()

    def expected(self, x: Int8Rows, weight: Int8Weight) -> torch.Tensor:
        """The product of the first rows, fp64, by columns of the weight in pieces."""
        wide = x.values[:CHECKED].double()
        scales = x.scales[:CHECKED].double()
        wide = wide * (scales.repeat_interleave(x.group, 1) if x.group else scales[:, None])
        parts = [wide @ part.double().T for part in weight.values.split(4096)]
        return torch.cat(parts, 1) * weight.scales.double()

    def timed(
        self, name: str, calls: list[Callable[[], Any]], expected: torch.Tensor | None, **notes: Any
    ) -> dict:
        try:
            y = calls[0]()
            torch.cuda.synchronize()
            if Case.compiling:
                return {}
            found = microseconds(calls)
        except Exception as error:  # a variant that cannot run is a row as well
            row = {"name": name, **self.notes, **notes, "error": f"{type(error).__name__}: {error}"[:300]}
        else:
            row = {"name": name, **self.notes, **notes, "us": round(found, 2)}
            row["tflops"] = round(2 * self.rows * self.outputs * self.width / found / 1e6, 1)
            if expected is not None:
                off = y[:CHECKED].double() - expected
                row["off"] = float(f"{off.square().mean().sqrt() / expected.square().mean().sqrt():.3g}")
                row["bias"] = float(f"{(off * expected.sign()).mean() / expected.abs().mean():.3g}")
        print(row, flush=True)
        return row


def library(case: Case, fast: bool, dtype: torch.dtype = torch.bfloat16) -> list[Callable[[], Any]]:
    x = case.fp8
    return [
        lambda w=w: torch._scaled_mm(
            x.values, w.values.t(), scale_a=x.scales[:, None], scale_b=w.scales[None, :], out_dtype=dtype,
            use_fast_accum=fast,
        )
        for w in case.weights
    ]  # fmt: skip


def many(shape: str, rows: int) -> list[dict[str, Any]]:
    """All ways of a product of many rows."""
    case = Case(shape, rows)
    truth = case.expected(case.fp8, case.weights[0])
    exact8 = case.expected(case.int8, case.weights8[0])
    own, weights8 = case.int8, case.weights8
    found = [
        case.timed("_scaled_mm fast", library(case, True), truth),
        case.timed("_scaled_mm", library(case, False), truth),
        case.timed("_int_mm", [lambda w=w: torch._int_mm(own.values, w.values.t()) for w in weights8], None),
        case.timed("bf16 library", [lambda w=w: F.linear(case.dense, w) for w in case.plain], None),
        case.timed("ours int8", [lambda w=w: int8_linear(own, w, torch.bfloat16) for w in weights8], exact8),
    ]
    if rows == 4096:
        found.append(case.timed("_scaled_mm fast fp16", library(case, True, torch.float16), truth))
        found.append(case.timed("_scaled_mm fast fp32", library(case, True, torch.float32), truth))
    if rows > 64:
        variants = [(name, tiles | {"EXACT": 0}) for name, tiles in FAST.items()]
        variants += [(name, tiles | {"EXACT": 128}) for name, tiles in EXACT.items()]
        variants += [("128x128x128 4w 2p", FAST["128x128x128 4w 2p"] | {"EXACT": 128})]
        for name, tiles in variants:
            calls = [
                lambda w=w, t=tiles: int8_matmul_triton(case.fp8, w, torch.bfloat16, tiles=t)
                for w in case.weights
            ]
            found.append(case.timed(f"ours e4m3 {name}", calls, truth, exact=tiles["EXACT"]))
    if shape == "o":
        kinds = (("int8", case.groups8, case.weights8), ("e4m3", case.groups, case.weights))
        for kind, x, weights in kinds:
            calls = [lambda w=w, x=x: int8_linear(x, w, torch.bfloat16) for w in weights]
            found.append(case.timed(f"ours {kind} by heads", calls, case.expected(x, weights[0])))
    return found


def few(shape: str, rows: int) -> list[dict[str, Any]]:
    """Products of decode steps, whole, and parts of output and down products."""
    case = Case(shape, rows)
    found = []
    if shape in ("o", "down"):
        forms = (("int8", case.groups8 if shape == "o" else case.int8, case.weights8),
                 ("e4m3", case.groups if shape == "o" else case.fp8, case.weights))  # fmt: skip
        for kind, x, weights in forms:
            calls = [lambda w=w, x=x: int8_linear_parts(x, w) for w in weights]
            found.append(case.timed(f"parts {kind}", calls, None))
    for kind, x, weights in (("int8", case.int8, case.weights8), ("e4m3", case.fp8, case.weights)):
        calls = [lambda w=w, x=x: int8_linear(x, w, torch.bfloat16) for w in weights]
        found.append(case.timed(f"ours {kind}", calls, case.expected(x, weights[0])))
    found.append(case.timed("_scaled_mm fast", library(case, True), case.expected(case.fp8, case.weights[0])))
    return found


def outliers() -> list[dict[str, Any]]:
    """Errors of rows with channel outliers: 1% of the channels are 30 times as large."""
    found = []
    for width in (4096, 14336):
        x = torch.randn(CHECKED, width, device="cuda")
        x[:, ::100] *= 30
        rows = quantize_rows(x, dtype=E4M3)
        w = quantize_rows(torch.randn(4096, width, device="cuda"), dtype=E4M3)
        truth = rows.values.double() @ w.values.double().T * rows.scales.double()[:, None] * w.scales.double()
        for fast in (True, False):
            y = torch._scaled_mm(
                rows.values, w.values.t(), scale_a=rows.scales[:, None], scale_b=w.scales[None, :],
                out_dtype=torch.bfloat16, use_fast_accum=fast,
            )  # fmt: skip
            off = (y.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
            rounding = (
                truth.bfloat16().double() - truth
            ).square().mean().sqrt() / truth.square().mean().sqrt()
            found.append(
                {"name": "outliers", "width": width, "fast": fast, "off": float(off), "bf16": float(rounding)}
            )
            print(found[-1], flush=True)
    return found


def ends(rows: int) -> list[dict[str, Any]]:
    """Norm and activation that end in int8 and in e4m3."""
    found = []
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    inner = torch.randn(rows, 28672, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    for kind in (torch.int8, E4M3):
        ending = InInt8(dtype=kind)
        norms = [lambda e=ending: rms_norm(x, weight, 1e-6, x, ending=e)] * 8
        activations = [lambda k=kind: silu_mul_int8(inner, dtype=k)] * 4
        row = {"name": "ends", "rows": rows, "dtype": str(kind), "norm_us": microseconds(norms)}
        found.append(row | {"silu_us": microseconds(activations)})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--few", type=int, nargs="*", default=list(FEW))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    parser.add_argument(
        "--compile", action="store_true", help="run each product once, to fill Triton's cache"
    )
    parser.add_argument("--json", type=Path, help="file to write the object to as well")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    Case.compiling = arguments.compile
    end = time.monotonic() + arguments.seconds
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                              "triton": triton.__version__, "rows": []}  # fmt: skip
    print(result, flush=True)
    if not arguments.compile:
        result["rows"] += outliers()
        for rows in (1, 64, 4096):
            result["rows"] += ends(rows)
    jobs = [
        (many, shape, rows) for rows in sorted(arguments.rows, reverse=True) for shape in arguments.shapes
    ]
    small = [(few, shape, rows) for rows in arguments.few for shape in arguments.shapes]
    jobs.sort(key=lambda job: job[2] != 4096)
    for work, shape, rows in [*jobs[:4], *small, *jobs[4:]]:
        if time.monotonic() < end:
            try:
                result["rows"] += work(shape, rows)
            except Exception as error:
                print("failed", shape, rows, repr(error)[:300], flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
