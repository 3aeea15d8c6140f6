"""Which tiles the products of a decode step should have, of 8 bits on both sides or of weights of 4 inside 8:
timed inside the whole step, 16 layers of the 7B shape over a cache in fp16 in a CUDA graph, without a head,
as layers/decoder_forward.py goes.

First the defaults, then every op's tiles in turn; what makes the step faster stays for the next op. Those of
4 bits, which have products up to 16 rows, load straight into registers; of 8 bits the parts of the products
of many rows are among them from 17 rows on. A case's kernels are compiled by all cores before it is timed,
and its figures written when it ends. A line a case says what to enter in ``kernels/tiles/tile_tables.py``.

    python benchmarks/int8_variants.py --json docs/results/int8_variants.json
    python benchmarks/int8_variants.py --cases 8x8,4x1 --limit-s 60  # bits x rows
    python benchmarks/int8_variants.py --dry --cases 8x4             # tiny, on a CPU: no figures
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch

sys.path.insert(0, str(Path(__file__).parent))
from decode_candidates import Tiles
from decode_stack import EPS, LONGEST, Shape, Stack
from product_candidates import small_int8_candidates
from tile_sweep import arguments, run_cases, runs
from timing import replay_us

from ingot.kernels.activation.silu_mul_int8 import silu_mul_int8
from ingot.kernels.attention.attention_arguments import AttentionOutput, Scoring, Sequences
from ingot.kernels.attention.int8_heads import int8_heads
from ingot.kernels.attention.paged_attention import paged_attention
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.few_rows.small_qkv import small_int8_qkv
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.product.int8.int8_matmul import int8_matmul_parts_triton
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight, quantize_rows
from ingot.kernels.rows.row_endings import InInt8
from ingot.kernels.tiles.int8_tiles import LARGE_NAMES, small_int8_tiles
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight

CASES = "8x8,8x1,4x8,4x1,8x16,4x16,8x64,8x32"
OPS = ("gate_up", "qkv", "down", "o")
SPLIT = ("down", "o")
GROUP = 128  # columns, of 4 bits
LAYERS, WORTH_US = 16, 0.1  # a layer; less is noise
KEPT = frozenset({"BLOCK_T", "OVERLAP", "FRAGMENTS", "SPLITS"})  # of a default
SHOWN = 8  # of an op's tiles, the fastest
TINY = Shape(hidden=128, inner=256, heads=1, head_dim=128, vocabulary=96, context=32, block=16)
Choice = tuple[bool, Tiles]  # whether the products of many rows compute the op, and tiles
DEFAULT: Choice = (False, {})


class Int8Stack(Stack):
    """A stack whose layers multiply in 8 bits; it has no head."""

    def __init__(self, bits: int, rows: int, layers: int, dry: bool = False) -> None:
        device, shape = ("cpu", TINY) if dry else ("cuda", Shape())
        super().__init__(1, rows, device, shape, heads=0)
        self.layers, self.dry = layers, dry
        self.caches = [self.caches[0]] * layers if rows > 8 else [
            [torch.randn_like(t) for t in self.caches[0]] for _ in range(layers)
        ]  # fmt: skip
        numbers = self._numbers if bits == 8 else self._pairs
        self.int8 = {op: [numbers(*shape.products()[op]) for _ in range(layers)] for op in OPS}
        if not dry:
            torch.cuda.synchronize()

    def _numbers(self, outputs: int, width: int) -> AnyInt8:
        device = self.x.device
        values = torch.randn(outputs, width, device=device).mul_(40).round_().clamp_(-127, 127).to(torch.int8)
        return Int8Weight(values, torch.full((outputs,), 1.28 / 40 / width**0.5, device=device))

    def _pairs(self, outputs: int, width: int) -> AnyInt8:
        device, shape = self.x.device, (width // GROUP, outputs)
        pairs = torch.randint(256, (outputs, width // 2), dtype=torch.uint8, device=device)
        steps = torch.randint(4, 15, shape, dtype=torch.uint8, device=device)
        zeros = torch.full(shape, 8, dtype=torch.uint8, device=device)
        scales = torch.full((outputs,), 1.28 / 45 / width**0.5, device=device)
        return Int4Weight(pairs, steps, zeros, scales, GROUP, width)

    def step(self, plan: dict[str, Choice]) -> torch.Tensor:
        """All layers."""
        stream, shape, norm = self.x, self.shape, self.norm
        x, _ = rms_norm(stream, norm, EPS, ending=InInt8())
        for layer in range(self.layers):
            q = self.op("qkv", x, layer, plan)
            out = torch.empty(q.shape, dtype=torch.int8, device=q.device)
            scales = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            cache, sequences = PagedCache(*self.caches[layer]), Sequences(self.tables, self.lengths, LONGEST)
            where = (cache, sequences, Scoring(shape.head_dim**-0.5))
            paged_attention(q, *where, output=AttentionOutput(out, scales), arrivals=self.arrivals)
            parts = self.op("o", int8_heads(out, scales), layer, plan)
            x, stream = sum_norm(parts, stream, norm, EPS, ending=InInt8())
            inner = silu_mul_int8(self.op("gate_up", x, layer, plan))
            parts = self.op("down", inner, layer, plan)
            x, stream = sum_norm(parts, stream, norm, EPS, ending=InInt8())
        return stream

    def op(self, op: str, x: Int8Rows, layer: int, plan: dict[str, Choice]) -> Any:
        """One product as the walk launches it."""
        large, tiles = plan.get(op, DEFAULT)
        weight = self.int8[op][layer]
        if op == "qkv":
            return small_int8_qkv(x, weight, None, self.place(self.batch, layer), tiles)
        if op == "gate_up":
            return int8_linear(x, weight, torch.float16, None, None, None, tiles)
        return (int8_matmul_parts_triton if large else int8_linear_parts)(x, weight, tiles)

    def only(self, op: str, choice: Choice) -> None:
        """One op of one layer."""
        width = self.shape.products()[op][1]
        group = self.shape.head_dim if op == "o" else 0
        x = torch.randn(self.batch, width, device=self.x.device)
        self.op(op, quantize_rows(x, group), 0, {op: choice})


def candidates(bits: int, op: str, rows: int) -> list[Choice]:
    """What to try of an op beside the default; of 4 bits up to 16 rows."""
    splits = (4, 8) if op in SPLIT else (1,)
    found: list[Choice] = []
    if bits == 4:
        for block_k in (128,) if op == "o" else (128, 256):
            for block, warps, depth in (
                (32, 4, 1),
                (16, 4, 1),
                (32, 2, 1),
                (64, 4, 1),
                (16, 8, 1),
                (32, 8, 1),
                (32, 4, 2),
                (16, 4, 2),
            ):
                tiles = {"BLOCK_N": block, "BLOCK_K": block_k, "num_warps": warps, "FRAGMENTS": depth}
                found += [(False, tiles | {"PROGRAMS": 0, "SPLITS": count}) for count in splits]
    else:
        default = small_int8_tiles(rows, 0, 0, torch.device("cpu"), split=op in SPLIT)
        for tiles in small_int8_candidates(default)[1:]:
            own = {name: number for name, number in tiles.items() if name not in KEPT}
            found += [(False, own | {"SPLITS": count}) for count in splits]
    if bits == 8 and rows > 16 and op in SPLIT:
        for shape in (
            (64, 64, 0, 128, 4, 5, 1, 0),
            (64, 64, 0, 256, 4, 3, 1, 0),
            (64, 128, 0, 128, 4, 4, 1, 0),
        ):
            if op == "down" or shape[3] == 128:
                tiles = dict(zip(LARGE_NAMES, shape, strict=True))
                found += [(True, tiles | {"SPLITS": count}) for count in splits]
    return found


def compile_share(rank: int, ranks: int, bits: int, rows: int) -> None:
    """Run one in ``ranks`` of a case's kernels once, so that they are on disk."""
    stack = Int8Stack(bits, rows, 1)
    calls: list[Callable[[], Any]] = [lambda: stack.step({})]
    for op in OPS:
        calls += [
            lambda op=op, choice=choice: stack.only(op, choice) for choice in candidates(bits, op, rows)
        ]
    for call in calls[rank::ranks]:
        runs(call)


class Sweep:
    """One case; ``end`` is when it should stop, by ``time.monotonic``."""

    def __init__(self, bits: int, rows: int, dry: bool, end: float) -> None:
        self.stack = Int8Stack(bits, rows, 2 if dry else LAYERS, dry)
        self.bits, self.rows, self.dry, self.end = bits, rows, dry, end
        self.plan: dict[str, Choice] = {}

    def median(self, plan: dict[str, Choice]) -> float:
        """Microseconds a layer; without end for tiles that do not fit."""
        if self.dry:
            self.stack.step(plan)
            return 0.0
        if not runs(lambda: self.stack.step(plan)):
            return float("inf")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.stack.step(plan)
        times = [replay_us(graph) / self.stack.layers for _ in range(8)]
        return statistics.median(times[2:])

    def tiles(self, op: str) -> list[tuple[float, bool, Tiles]]:
        """The fastest choices of an op; the best stays if it is worth it."""
        now, found = self.median(self.plan), []
        choices = candidates(self.bits, op, self.rows)
        for choice in choices[::5] if self.dry else choices:
            if time.monotonic() > self.end:
                break
            found.append((self.median({**self.plan, op: choice}), *choice))
        found = sorted((row for row in found if row[0] < float("inf")), key=lambda row: row[0])
        if found and found[0][0] < now - WORTH_US:
            self.plan[op] = found[0][1:]
        return found[:SHOWN]

    def run(self) -> dict[str, Any]:
        """The case's figures, and a line."""
        first = self.median({})
        tried = {op: self.tiles(op) for op in OPS}
        last = self.median(self.plan)
        late = time.monotonic() > self.end
        ending = f"{self.plan}{', stopped early' if late else ''}"
        print(
            f"{self.bits} bits, {self.rows} rows: {first:.1f} -> {last:.1f} us a layer: {ending}", flush=True
        )
        figures = {
            "bits": self.bits,
            "rows": self.rows,
            "before_us": first,
            "after_us": last,
            "plan": self.plan,
        }
        return figures | {"stopped_early": late, "tried": tried}


if __name__ == "__main__":
    run_cases(arguments(__doc__, CASES).parse_args(), compile_share, Sweep)
