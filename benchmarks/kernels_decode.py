"""Products of a decode step at the 7B LLaMA shape: each op, and 32 layers of them as one CUDA graph.

Times every fused op beside the matrix library's product with the separate norm, rotary and activation
kernels, over the weights of 32 layers in turn, so that nothing comes from the L2 cache. ``--sweep`` first
looks for the best tiles; ``--compile I/N`` only compiles every Nth candidate (run N of them at once before).

    python benchmarks/kernels_decode.py --sweep --tiles best.json --json docs/results/kernels_decode.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from decode_candidates import Tiles, candidates
from decode_stack import CONTEXT, LAYERS, SERIAL, SHAPES, Plan, Stack

READ_GB_S = 4421.0
OPS = (*SHAPES, "attention", "norm")


def graph_us(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Microseconds of all ``calls`` together as one CUDA graph, one figure a replay, sorted."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begun = time.monotonic()
    while time.monotonic() - begun < 3e-3:  # an idle GPU's clocks need a while
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)


def each_us(
    call: Callable[[int], Any], copies: int, repeats: int = 5, times_over: int = 1
) -> dict[str, float]:
    """Median and 90th percentile of one call over the copies in turn."""
    calls = [lambda copy=copy: call(copy % copies) for copy in range(max(copies, 8) * times_over)]
    times = [total / len(calls) for total in graph_us(calls, repeats)]
    return {"us": round(statistics.median(times), 2), "p90_us": round(times[int(0.9 * len(times))], 2)}


def rate(op: str, us: float) -> dict[str, float]:
    """GB/s of weights read, and the share of the read ceiling."""
    rows, cols = SHAPES[op]
    gb_s = rows * cols * 2 / us * 1e-3
    return {"gb_s": round(gb_s), "percent_of_read": round(100 * gb_s / READ_GB_S, 1)}


def copies_of(stack: Stack, op: str) -> int:
    """Layers whose weights an op walks through."""
    return 2 if op == "head" else stack.layers


def sweep(stack: Stack, ops: list[str], rows: list[int], seconds: float) -> dict[str, Any]:
    """Best tiles by op and number of rows, each op within its share of ``seconds``."""
    found: dict[str, Any] = {}
    share = seconds / (len(ops) * len(rows))
    for op in ops:
        for count in rows:
            stop = time.monotonic() + share
            timed: list[tuple[float, Tiles]] = []
            tried = candidates(op, count)
            for tiles in tried:
                if time.monotonic() > stop:
                    print(f"{op} {count}: out of time after {len(timed)} of {len(tried)}", flush=True)
                    break
                timed.append((candidate_us(stack, op, count, tiles), tiles))
            timed.sort(key=lambda pair: pair[0])
            found[f"{op}.{count}"] = timed
            for us, tiles in timed[:5]:
                print(f"{op} {count} rows {us:8.2f} us {compact(tiles)}", flush=True)
    return found


def compact(tiles: Tiles) -> str:
    """Tiles on one short line."""
    return " ".join(f"{name.removeprefix('BLOCK_')}={value}" for name, value in tiles.items())


def candidate_us(stack: Stack, op: str, rows: int, tiles: Tiles) -> float:
    """Microseconds of one op with these tiles; infinite where they do not fit the GPU."""
    try:
        return each_us(
            lambda i: stack.fused(op, i, rows, tiles), copies_of(stack, op), 3, 1 + 9 * (op == "norm")
        )["us"]
    except Exception as error:
        if "OutOfResources" not in type(error).__name__:
            print(f"{op} {tiles}: {type(error).__name__}: {error}"[:300], flush=True)
        return float("inf")


def compile_share(share: str, ops: list[str], rows: list[int]) -> None:
    """Compile this process's share of the candidates into Triton's cache."""
    index, count = (int(part) for part in share.split("/"))
    stack = Stack(1, max(rows))
    jobs = [(op, n, t) for op in ops for n in rows for t in candidates(op, n)]
    for op, n, tiles in jobs[index::count]:
        try:
            stack.fused(op, 0, n, tiles)
        except Exception as error:
            if "OutOfResources" not in type(error).__name__:
                print(f"compile {op} {n} {tiles}: {type(error).__name__}: {error}"[:500], flush=True)
    torch.cuda.synchronize()


def refine(stack: Stack, rows: int, plan: Plan, timed: dict[str, Any], seconds: float) -> Plan:
    """Try the runners-up of every op inside the whole step, and keep what makes the step faster."""
    stop = time.monotonic() + seconds

    def step_us(candidate: Plan) -> float:
        return graph_us([lambda: stack.fused_step(rows, candidate)], 4)[1]

    # Alone, a kernel overlaps only itself: start from the fastest tiles with and without overlap.
    starts = [dict(plan)]
    for wanted in ((1,), (2, 4)):
        pick = {op: [t for _, t in timed[f"{op}.{rows}"] if t["OVERLAP"] in wanted] for op in plan}
        starts.append({op: found[0] if found else plan[op] for op, found in pick.items()})
    best = min(starts, key=step_us)
    best_us = step_us(best)
    print(f"{rows} rows: step {best_us:.0f} us before", flush=True)
    order = [op for op in ("o", "gate_up", "down", "qkv", "norm", "head", "attention") if op in plan] * 2
    for place, op in enumerate(order):
        share = time.monotonic() + (stop - time.monotonic()) / (len(order) - place)
        tried = 0
        for _, tiles in timed.get(f"{op}.{rows}", []):
            if time.monotonic() > share:
                break
            tried += 1
            trial = {**best, op: tiles}
            us = step_us(trial)
            if us < best_us - 1:
                best, best_us = trial, us
        print(
            f"{rows} rows: {op} {tried} tried, step {best_us:.0f} us, {compact(best[op] or {})}", flush=True
        )
    print(f"{rows} rows: step {best_us:.0f} us after {best}", flush=True)
    return best


def plan_for(plans: dict[str, Plan], rows: int) -> Plan:
    """Tiles of the next larger number of rows that was swept; none without."""
    swept = sorted(int(count) for count in plans if int(count) >= rows)
    return plans[str(swept[0])] if swept else {}


def measure_ops(stack: Stack, rows: list[int], plans: dict[str, Plan]) -> dict[str, Any]:
    """Each op, fused and unfused."""
    found: dict[str, Any] = {}
    for op in OPS:
        for count in rows:
            tiles = plan_for(plans, count).get(op)
            copies = copies_of(stack, op)
            over = 10 if op == "norm" else 1
            fused = each_us(lambda i: stack.fused(op, i, count, tiles), copies, 20, over)  # noqa: B023
            unfused = each_us(lambda i: stack.unfused(op, i, count), copies, 20, over)  # noqa: B023
            found[f"{op}.{count}"] = {
                "fused": fused | (rate(op, fused["us"]) if op in SHAPES else {}),
                "library_and_separate_kernels": unfused | (rate(op, unfused["us"]) if op in SHAPES else {}),
            }
            print(f"{op} {count}: {found[f'{op}.{count}']}", flush=True)
    return found


def measure_steps(stack: Stack, rows: list[int], plans: dict[str, Plan]) -> dict[str, Any]:
    """Milliseconds of 32 layers and the head, fused and unfused, and how far their logits lie apart."""
    found: dict[str, Any] = {}
    for count in rows:
        plan = plan_for(plans, count)
        fused, unfused = stack.fused_step(count, plan).float(), stack.unfused_step(count, SERIAL).float()
        row: dict[str, float] = {"logits_apart": round(float((fused - unfused).norm() / unfused.norm()), 5)}
        serial = {op: {**(tiles or {}), "OVERLAP": 1} for op, tiles in plan.items()}
        for op in OPS:
            serial.setdefault(op, {"OVERLAP": 1})
        ways = [
            ("fused", lambda: stack.fused_step(count, plan)),  # noqa: B023
            ("fused_without_overlap", lambda: stack.fused_step(count, serial)),  # noqa: B023
            ("library_and_separate_kernels", lambda: stack.unfused_step(count, SERIAL)),  # noqa: B023
        ]
        if count == 1 and "8" in plans:
            ways.append(("matrix", lambda: stack.matrix_step(1, plans["8"])))
        for name, step in ways:
            times = graph_us([step], 30)
            row[f"{name}_ms"] = round(times[15] / 1e3, 3)
            row[f"{name}_p90_ms"] = round(times[27] / 1e3, 3)
        found[str(count)] = row
        print(f"step {count}: {row}", flush=True)
    return found


def main() -> None:
    """Sweep if asked to, then time ops and steps, and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--ops", default=",".join(OPS), help="ops to sweep")
    parser.add_argument("--sweep", type=float, metavar="SECONDS", default=0.0)
    parser.add_argument("--sweep-rows", default="1,8,16")
    parser.add_argument("--refine", type=float, metavar="SECONDS", default=0.0)
    parser.add_argument("--compile", metavar="I/N")
    parser.add_argument("--tiles", type=Path, help="tiles by rows and op: read if there, else written")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, sweep_rows = ([int(n) for n in text.split(",")] for text in (arguments.rows, arguments.sweep_rows))
    ops = arguments.ops.split(",")
    if arguments.compile:
        compile_share(arguments.compile, ops, sweep_rows)
        return
    plans: dict[str, Plan] = {}
    if arguments.tiles and arguments.tiles.exists():
        plans = json.loads(arguments.tiles.read_text())
    stack = Stack(LAYERS, max(rows))
    timed: dict[str, Any] = {}
    if arguments.sweep:
        timed = sweep(stack, ops, sweep_rows, arguments.sweep)
        for count in sweep_rows:
            plan = plans.setdefault(str(count), {})
            plan |= {op: timed[f"{op}.{count}"][0][1] for op in ops if timed.get(f"{op}.{count}")}
            if arguments.refine:
                plans[str(count)] = refine(stack, count, plan, timed, arguments.refine)
        if arguments.tiles:
            arguments.tiles.write_text(json.dumps(plans, indent=1))
    results = {
        "command": "python " + " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read_ceiling_gb_s": READ_GB_S,
        "context_tokens": CONTEXT,
        "steps": measure_steps(stack, rows, plans),
        "ops": measure_ops(stack, rows, plans),
        "tiles": plans,
        "swept_us": {name: {compact(t): us for us, t in found[:30]} for name, found in timed.items()},
    }
    text = json.dumps(results)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
