"""Which kernels a decode step should use at 1 to 128 rows: variants of the whole step, timed side by side.

Each variant is one CUDA graph of 32 layers and head of a shape; variants are replayed in turn, so that
the GPU's clocks favour none. First the tiles: at 8, 16, 32 and 64 rows every op of the fused step in turn
takes each of its candidates (equal shares for full waves of programs, x pipelined with the weights or not)
and keeps what makes the step faster. Then the ways: at every number of rows today's step, the fused step with
today's and with the new tiles, and steps that leave products to the matrix library with early launches around
them. The last line says what to enter: tiles by bucket of rows (kernels/tiles/tile_tables.py), and the
table of row numbers (layers/products/product_choice.py, DENSE_ROWS). About 60 s on an H200 with 16 cores.

    python benchmarks/decode_variants.py --shape llama31-8b --json variants.json
    python benchmarks/decode_variants.py --dry --rows 1,2,9,70 --sweep-rows 8,33  # tiny, on a CPU: no figures
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch

sys.path.insert(0, str(Path(__file__).parent))
from decode_candidates import Tiles, even_candidates
from decode_stack import LAYERS, NAMED, SHAPES, Plan, Shape, Stack
from timing import replay_us

from ingot.kernels.activation import gated_mlp
from ingot.kernels.cache import rope_kv_write
from ingot.kernels.norm import rms_norm, sum_norm
from ingot.kernels.product.few_rows import small_gate_up, small_linear, small_qkv
from ingot.layers.products.product_choice import small_products

TINY = Shape(hidden=64, inner=70, heads=2, head_dim=32, vocabulary=90, context=32, block=16)
ALL, NONE = frozenset(SHAPES), frozenset[str]()
MIXED = {
    "o and down small": frozenset({"o", "down"}),
    "qkv, o, down small": frozenset({"qkv", "o", "down"}),
    "gate_up, o, down small": frozenset({"gate_up", "o", "down"}),
    "gate_up small": frozenset({"gate_up"}),
    "qkv, gate_up small": frozenset({"qkv", "gate_up"}),
    "all small but the head": ALL - {"head"},
}
OPS = ("gate_up", "qkv", "down", "o", "head", "attention")
EARLY: Plan = {"rope": {"OVERLAP": 2}, "silu": {"OVERLAP": 2}}
LIGHT: Plan = {"library": {"LIGHT": 1}}  # cuBLASLt instead of cuBLAS
WORTH_US = 4.0  # a step; less is noise
Way = tuple[frozenset[str] | None, Plan]  # products of the small kernels (None: one row's own), tiles
Call = Callable[[], Any]


class Bench:
    """A stack and how its steps are timed: as CUDA graphs, or in a dry run once each."""

    def __init__(self, stack: Stack, dry: bool) -> None:
        self.stack, self.dry = stack, dry

    def step(self, rows: int, way: Way) -> torch.Tensor:
        """Logits of a step."""
        small, plan = way
        if self.dry:  # the interpreter knows no early launch
            plan = {op: {**tiles, "OVERLAP": 1} for op, tiles in plan.items() if tiles}
        if small is None:
            return self.stack.folded_step(rows, plan)
        if "library" in plan and not self.dry:
            torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            return self.stack.hybrid_step(rows, plan, small)
        finally:
            torch.backends.cuda.preferred_blas_library("default")

    def times(self, rows: int, ways: list[Way], rounds: int) -> list[list[float]]:
        """Microseconds of every round of every way, replayed in turn; infinite for one that does not fit."""
        replays = [self._replay(lambda way=way: self.step(rows, way)) for way in ways]
        found: list[list[float]] = [[] for _ in ways]
        idle = 0 if self.dry else 2  # an idle GPU's clocks need a while
        for turn in range(rounds + idle):
            for replay, times in zip(replays, found, strict=True):
                us = replay() if replay else float("inf")
                if turn >= idle:
                    times.append(us)
        return found

    def _replay(self, call: Call) -> Callable[[], float] | None:
        if self.dry:
            return lambda: _clocked(call)
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"does not run: {type(error).__name__}: {error}"[:300], flush=True)
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return lambda: replay_us(graph)


def _clocked(call: Call) -> float:
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e6


def short(tiles: Tiles | None) -> str:
    """Tiles on one short line."""
    return " ".join(f"{k.removeprefix('BLOCK_')}={v}" for k, v in (tiles or {}).items()) or "default"


def options(op: str, rows: int) -> list[Tiles]:
    """What to try for an op beside its default."""
    if op == "attention":
        return [{"OVERLAP": 4}, {"OVERLAP": 4, "BLOCK_N": 64, "num_warps": 2, "MAX_SPLITS": 32}]
    return even_candidates(op, rows)


def sweep(bench: Bench, rows: int, table: list[dict[str, Any]], rounds: int) -> Plan:
    """Tiles by op that make the fused step faster, one op after the other; a line of the table an op."""
    plan: Plan = {}
    for op in OPS:
        small = None if rows == 1 else ALL
        base: Way = (small, plan)
        gains: list[tuple[float, Tiles]] = []
        for tiles in options(op, rows):
            before, after = bench.times(rows, [base, (small, {**plan, op: tiles})], rounds)
            gains.append((statistics.median(before) - statistics.median(after), tiles))
        gains.sort(key=lambda pair: -pair[0])
        gain, best = gains[0]
        kept = gain > WORTH_US
        if kept:
            plan = {**plan, op: best}
        tried = [{"gain_us": round(us, 1) if us > -1e9 else None, "tiles": t} for us, t in gains]
        table.append({"rows": rows, "op": op, "kept": kept, "tried": tried})
        print(
            f"{rows:4} rows {op:10} {gain:7.1f} us a step {'kept' if kept else 'not '} {short(best)}",
            flush=True,
        )
        for us, tiles in gains[1:]:
            print(f"{'':30}{us:7.1f}  {short(tiles)}", flush=True)
    return plan


def ways(rows: int, best: Plan) -> dict[str, Way]:
    """Every way to compute a step of this many rows; today's first."""
    today: Way = (None if rows == 1 else small_products(rows), {})
    found = {"today": today}
    long = {"OVERLAP": 4, "BLOCK_N": 64, "num_warps": 2, "MAX_SPLITS": 32}
    found["today, attention 4"] = (today[0], {"attention": {"OVERLAP": 4}})
    found["today, attention of long tiles"] = (today[0], {"attention": long})
    if rows == 1:
        found["today, best tiles"] = (None, best)
    if rows <= 64 and rows > 1:
        found |= {"small": (ALL, {}), "small, best tiles": (ALL, best)}
        found |= {f"{name}, best tiles": (small, {**best, **EARLY}) for name, small in MIXED.items()}
        for name in ("gate_up small", "qkv, gate_up small"):
            found[f"{name}, best tiles, cublaslt"] = (MIXED[name], {**best, **EARLY, **LIGHT})
    if rows > 1:
        early = EARLY | {"attention": {"OVERLAP": 4}}
        found |= {"library, early": (NONE, early), "library, early, cublaslt": (NONE, {**early, **LIGHT})}
    return found


def compare(bench: Bench, rows: int, best: Plan, rounds: int) -> dict[str, Any]:
    """Median and 90th percentile of every way, how far its logits lie from today's, and the fastest."""
    found: dict[str, Any] = {}
    choices = ways(rows, best)
    logits = {name: bench.step(rows, way).float() for name, way in choices.items()}
    for name, times in zip(choices, bench.times(rows, list(choices.values()), rounds), strict=True):
        ordered = sorted(times)
        apart = float((logits[name] - logits["today"]).norm() / logits["today"].norm())
        found[name] = {
            "ms": round(statistics.median(ordered) / 1e3, 3),
            "p90_ms": round(ordered[int(0.9 * len(ordered))] / 1e3, 3),
            "logits_apart": round(apart, 5),
        }
        print(f"{rows:4} rows {name:34} {found[name]}", flush=True)
        if not apart < 0.02:
            raise SystemExit(f"{name} at {rows} rows computes something else: {apart}")
    name = min(found, key=lambda way: found[way]["ms"])
    if found["today"]["ms"] - found[name]["ms"] < WORTH_US / 1e3:
        name = "today"
    small, plan = choices[name]
    products = "one row's kernels" if small is None else sorted(small)
    return {"ways": found, "best": name, "small": products, "tiles": plan}


def jobs(rows: list[int]) -> list[tuple[int, str, Tiles]]:
    """What there is to compile: every candidate of every product."""
    found = []
    for count in rows:
        for op in SHAPES:
            found += [(count, op, tiles) for tiles in ({}, *even_candidates(op, count))]
    return found


def compile_share(share: str, sweep_rows: list[int], rows: list[int], shape: Shape) -> None:
    """Compile this process's share of the candidates into Triton's cache, then of the steps."""
    index, count = (int(part) for part in share.split("/"))
    stack = Stack(1, max(*rows, *sweep_rows), shape=shape, heads=1)
    bench = Bench(stack, dry=False)
    calls: list[Call] = []
    for number, op, tiles in jobs(sweep_rows):
        calls.append(lambda n=number, o=op, t=tiles: compile_op(stack, o, n, t))
    for number in rows:
        calls += [lambda n=number, way=way: bench.step(n, way) for way in ways(number, {}).values()]
    for call in calls[index::count]:
        try:
            call()
        except Exception as error:
            if "OutOfResources" not in type(error).__name__:
                print(f"compile: {type(error).__name__}: {error}"[:500], flush=True)
    torch.cuda.synchronize()


def compile_op(stack: Stack, op: str, rows: int, tiles: Tiles) -> None:
    """One op, and the norm that ends its parts."""
    columns = 1 if rows == 1 else max(1 << (rows - 1).bit_length(), 8)
    y = stack.fused(op, 0, rows, {"BLOCK_T": columns, **tiles})
    if op in ("o", "down") and rows > 1:
        sum_norm.sum_norm(y, stack.x[:rows], stack.norm, 1e-6)


def compile_all(count: int, arguments: argparse.Namespace) -> None:
    """Run ``count`` processes that compile, and wait for them."""
    base = [sys.executable, __file__, "--rows", arguments.rows, "--sweep-rows", arguments.sweep_rows]
    base += ["--shape", arguments.shape]
    running = [subprocess.Popen([*base, "--compile", f"{index}/{count}"]) for index in range(count)]
    failed = [process.args for process in running if process.wait()]
    if failed:
        print(f"{len(failed)} of {count} compiling processes failed", flush=True)


def interpret() -> None:
    """Kernels instead of their twins on a CPU, but for attention, which takes the interpreter long."""
    for module in (gated_mlp, rms_norm, rope_kv_write, small_gate_up, small_linear, small_qkv, sum_norm):
        mock.patch.object(module, "runs_on_gpu", return_value=True).start()


def measure(bench: Bench, sweep_rows: list[int], rows: list[int], rounds: int) -> dict[str, Any]:
    """The sweep, then the ways, then what follows from them."""
    table: list[dict[str, Any]] = []
    best = {count: sweep(bench, count, table, rounds) for count in sweep_rows}
    compared = {}
    for count in rows:
        bucket = next((b for b in sorted(best) if b >= count), None)
        compared[count] = compare(
            bench, count, best[bucket] if bucket and (count > 1 or bucket == 1) else {}, 2 * rounds
        )
    limits = [(count, found["small"], found["best"]) for count, found in compared.items()]
    return {"ops": table, "steps": compared, "recommended": {"tiles": best, "row_limits": limits}}


def main() -> None:
    """Compile, sweep, compare, and print what to enter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--sweep-rows", default="8,16,32,64")
    parser.add_argument("--rounds", type=int, default=10, help="replays of each variant in a sweep")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile at once")
    parser.add_argument("--shape", choices=list(NAMED), default="llama-7b")
    parser.add_argument("--compile", metavar="I/N")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU, one replay each")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, sweep_rows = ([int(n) for n in text.split(",")] for text in (arguments.rows, arguments.sweep_rows))
    if arguments.compile:
        compile_share(arguments.compile, sweep_rows, rows, NAMED[arguments.shape])
        return
    begun = time.monotonic()
    seconds: dict[str, float] = {}
    if arguments.dry:
        interpret()
        stack, rounds = Stack(1, max(rows), "cpu", TINY), 1
    else:
        compile_all(arguments.processes, arguments)
        seconds["compiled"] = round(time.monotonic() - begun)
        print(seconds, flush=True)
        stack, rounds = Stack(LAYERS, max(*rows, *sweep_rows), shape=NAMED[arguments.shape]), arguments.rounds
    found = measure(Bench(stack, arguments.dry), sweep_rows, rows, rounds)
    seconds["all"] = round(time.monotonic() - begun)
    results = {
        "command": shlex.join(["python", *sys.argv]),
        "device": "none: a dry run" if arguments.dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": seconds,
        **found,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({"seconds": seconds, **found["recommended"]}))


if __name__ == "__main__":
    main()
