"""Whose a decode step's products should be for weights of 8 and of 4 bits, and with which tiles: timed inside
the whole step, 16 layers of the 7B shape in a CUDA graph, without a head.

First the ways: all products in the small kernels, each in ``packed_matmul``, and the best of those together.
Then every op's tiles of both kinds in turn; what makes the step faster stays for the next op. A case's
kernels are compiled by all cores before it is timed, and its figures written when it ends. A line a case says
what to enter in ``layers/products/product_choice.py`` and ``kernels/tiles/tile_tables.py``.

    python benchmarks/narrow_variants.py --json docs/results/narrow_variants.json
    python benchmarks/narrow_variants.py --cases 4x64,8x64 --limit-s 240    # bits x rows
    python benchmarks/narrow_variants.py --cases 4x256 --packed             # of packed_matmul alone
    python benchmarks/narrow_variants.py --dry --cases 4x9                  # tiny, on a CPU: no figures
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch

sys.path.insert(0, str(Path(__file__).parent))
from decode_candidates import Tiles
from decode_stack import Plan, Shape, Stack, apart, ordered
from product_candidates import packed_candidates
from tile_sweep import arguments, run_cases, runs
from timing import replay_us

from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.product.few_rows.small_gate_up import small_gate_up
from ingot.kernels.product.few_rows.small_linear import small_linear_parts
from ingot.kernels.product.few_rows.small_qkv import small_qkv
from ingot.kernels.product.packed.packed_matmul import packed_matmul_parts
from ingot.kernels.rows.operand_rows import operand_rows
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.weight.stored_weight import StoredWeight, num_rows, num_words

CASES = "4x64,4x32,8x64,8x32,4x16,8x16,4x8,8x8,4x1,8x1"  # what is most in doubt first
OPS = ("gate_up", "qkv", "down", "o")
SPLIT = ("down", "o")
LAYERS, GROUP, WORTH_US = 16, 128, 0.1  # a layer; less is noise
PACKED_FROM = 9  # rows; fewer load words straight into registers
SHOWN = 8  # of an op's tiles, the fastest
TINY = Shape(hidden=128, inner=256, heads=2, head_dim=64, vocabulary=96, context=32, block=16)
ALL, NONE = frozenset(OPS), frozenset[str]()
Choice = tuple[bool, Tiles]  # whether a small kernel computes the op, and its tiles


def narrow_weight(outputs: int, width: int, bits: int, device: str) -> StoredWeight:
    """Random numbers; in 4 bits by groups, with zeros."""
    words = (num_rows(outputs), num_words(width, bits, GROUP if bits == 4 else 0))
    values = torch.randint(-(1 << 15), 1 << 15, words, dtype=torch.int16, device=device)
    step = 1.28 / width**0.5 / (4.6 if bits == 4 else 74)  # so that outputs are of order one
    if bits == 8:
        return StoredWeight(values, width, torch.full((outputs,), step, device=device).half(), None, 8)
    shape = (-(-width // GROUP), outputs)
    scales = torch.full(shape, step, device=device).half()
    zeros = torch.full(shape, 8, dtype=torch.uint8, device=device)
    return StoredWeight(values, width, scales, zeros, 4, GROUP)


class NarrowStack(Stack):
    """A stack whose layers' weights have few bits; it has no head."""

    def __init__(self, bits: int, rows: int, layers: int, dry: bool = False, packed: bool = False) -> None:
        self.small_ones = rows <= MAX_ROWS and not (packed and rows >= PACKED_FROM)
        device, shape = ("cpu", TINY) if dry else ("cuda", Shape())
        super().__init__(1, rows, device, shape, heads=0)
        self.layers = layers
        self.caches = [self.caches[0]] * layers if rows > 8 else [
            [torch.randn_like(t) for t in self.caches[0]] for _ in range(layers)
        ]  # fmt: skip
        for op in OPS:
            size = shape.products()[op]
            self.weights[op] = [narrow_weight(*size, bits, device) for _ in range(layers)]
        if not dry:
            torch.cuda.synchronize()

    def choices(self, op: str) -> list[Choice]:
        """What to try beside the defaults; ``packed_matmul``'s default is among it."""
        found = [(True, tiles) for tiles in candidates(op, self.batch)] if self.small_ones else []
        if self.batch >= PACKED_FROM:
            weight = self.weights[op][0]
            assert isinstance(weight, StoredWeight)
            packed = packed_candidates(self.batch, weight, self.x.device, op in SPLIT)
            found += [(False, tiles) for tiles in packed]
        return found

    def only(self, op: str, small: bool, tiles: Tiles) -> None:
        """One op of one layer, as the step launches it."""
        x, weight = self.inner if op == "down" else self.x, self.weights[op][0]
        if ordered(op, self.batch, weight, {op: tiles}, ALL if small else frozenset()):
            x = operand_rows(x)
        if op in SPLIT:
            (small_linear_parts if small else packed_matmul_parts)(x, weight, tiles)
        elif not small:
            apart(x, weight, tiles)
        elif op == "qkv":
            small_qkv(x, weight, None, None, 0.0, self.place(self.batch, 0), tiles)
        else:
            small_gate_up(x, weight, tiles=tiles)

    def step(self, plan: Plan, small: frozenset[str]) -> torch.Tensor:
        """All layers; the kernels beside ``packed_matmul`` start early, as in engines."""
        early = {"OVERLAP": 2} if overlaps(self.x.device) else None
        beside: Plan = dict.fromkeys(("rms", "rope", "silu"), early)
        return self.hybrid_step(self.batch, beside | plan, small, head=False)


def candidates(op: str, rows: int) -> list[Tiles]:
    """What to try of the small kernels beside the default."""
    found: list[Tiles] = []
    if rows <= 8:
        for block in (16, 32) if op in SPLIT else (32, 64):
            for warps in (2, 4, 8):
                for depth in (1, 2):
                    tiles = {"BLOCK_N": block, "num_warps": warps, "FRAGMENTS": depth}
                    found += [tiles | {"SPLITS": s} for s in (2, 4, 8)] if op in SPLIT else [tiles]
        return found
    for block, warps in ((64, 4), (128, 8)):
        for prefetch in (0, 1):
            tiles = {"BLOCK_N": block, "num_warps": warps, "num_stages": 4, "PREFETCH": prefetch}
            if op in SPLIT:
                found += [tiles | {"PROGRAMS": 0, "SPLITS": s} for s in (4, 8)]
            else:
                found += [tiles | {"PROGRAMS": p} for p in (0, 2)]
    return found


def compile_share(rank: int, ranks: int, bits: int, rows: int, packed: bool) -> None:
    """Run one in ``ranks`` of a case's kernels once, so that they are on disk."""
    stack = NarrowStack(bits, rows, layers=1, packed=packed)
    ways = [ALL] if stack.small_ones else []
    ways += [frozenset[str]()] if rows >= PACKED_FROM else []
    calls = [lambda small=small: stack.step({}, small) for small in ways]
    for op in OPS:
        calls += [lambda op=op, choice=choice: stack.only(op, *choice) for choice in stack.choices(op)]
    for call in calls[rank::ranks]:
        runs(call)


def replay(stack: NarrowStack, plan: Plan, small: frozenset[str], dry: bool) -> Callable[[], float] | None:
    """A call that times one step, in microseconds a layer; None for tiles that do not fit."""
    if dry:
        stack.step(plan, small)
        return lambda: 0.0
    if not runs(lambda: stack.step(plan, small)):
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stack.step(plan, small)

    def timed() -> float:
        return replay_us(graph) / stack.layers

    timed()
    return timed


class Sweep:
    """One case; ``end`` is when it should stop, by ``time.monotonic``."""

    def __init__(self, bits: int, rows: int, dry: bool, end: float, packed: bool) -> None:
        self.stack = NarrowStack(bits, rows, 2 if dry else LAYERS, dry, packed)
        self.bits, self.rows, self.dry, self.end = bits, rows, dry, end
        self.plan: Plan = {}
        self.small = ALL

    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.end

    def median(self, plan: Plan, small: frozenset[str]) -> float:
        """Microseconds a layer; without end for tiles that do not fit."""
        timed = replay(self.stack, plan, small, self.dry)
        return float("inf") if timed is None else statistics.median(timed() for _ in range(5))

    def ways(self) -> dict[str, float]:
        """Which products are whose, with default tiles; the best way stays."""
        found = {ALL: self.median({}, ALL)} if self.stack.small_ones else {NONE: self.median({}, NONE)}
        if self.rows >= PACKED_FROM and ALL in found:
            found |= {ALL - {op}: self.median({}, ALL - {op}) for op in OPS}
            gaining = sorted(OPS, key=lambda op: found[ALL - {op}])
            together = [ALL.difference(gaining[:count]) for count in range(2, len(OPS) + 1)]
            found |= {small: self.median({}, small) for small in together if not self.late()}
        self.small = min(found, key=lambda small: found[small])
        packed = {small: "+".join(op for op in OPS if op not in small) for small in found}
        return {f"packed {packed[small]}" if packed[small] else "small": us for small, us in found.items()}

    def tiles(self, op: str) -> list[tuple[float, str, Tiles]]:
        """The fastest choices of an op; the best stays if it is worth it."""
        now = self.median(self.plan, self.small)
        choices, found = self.stack.choices(op), []
        if self.dry:
            choices = [choice for kind in (True, False) for choice in choices if choice[0] == kind][::7]
        for small, tiles in choices:
            if self.late():
                break
            own = self.small | {op} if small else self.small - {op}
            found.append((self.median({**self.plan, op: tiles}, own), small, tiles))
        found = sorted((row for row in found if row[0] < float("inf")), key=lambda row: row[0])
        if found and found[0][0] < now - WORTH_US:
            _, small, self.plan[op] = found[0]
            self.small = self.small | {op} if small else self.small - {op}
        return [(us, "small" if small else "packed", tiles) for us, small, tiles in found[:SHOWN]]

    def run(self) -> dict[str, Any]:
        """The case's figures, and a line."""
        ways = self.ways()
        first = min(ways.values())
        tried = {op: self.tiles(op) for op in OPS}
        last = self.median(self.plan, self.small)
        ending = f"small {'+'.join(sorted(self.small))} {self.plan}{', stopped early' if self.late() else ''}"
        print(
            f"{self.bits} bits, {self.rows} rows: {first:.1f} -> {last:.1f} us a layer: {ending}\n"
            + "\n".join(f"    {name}: {us:.1f}" for name, us in ways.items()),
            flush=True,
        )
        return {
            "bits": self.bits,
            "rows": self.rows,
            "before_us": first,
            "after_us": last,
            "small": sorted(self.small),
            "plan": self.plan,
            "stopped_early": self.late(),
            "ways": ways,
            "tried": tried,
        }


def main() -> None:
    parser = arguments(__doc__, CASES)
    parser.add_argument("--packed", action="store_true", help="nothing of the small kernels from 9 rows on")
    given = parser.parse_args()
    run_cases(given, partial(compile_share, packed=given.packed), partial(Sweep, packed=given.packed))


if __name__ == "__main__":
    main()
