"""What a profiled step is made of: time by module and kernel, beside the machine's ceiling, and gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.bench.profile.trace_events import Op, StepTrace


@dataclass(frozen=True)
class LeastWork:
    """The least that a module of one step must move and compute: bytes and operations."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: LeastWork) -> LeastWork:
        return LeastWork(self.num_bytes + other.num_bytes, self.flops + other.flops)


def step_figures(trace: StepTrace, work: Mapping[str, LeastWork], ceiling: Ceiling) -> dict[str, Any]:
    """Figures of one step, the mean of the profiled ones; modules and their kernels by time, longest first.

    ``us`` are microseconds, ``launches`` counts of a step, ``share`` of the time of all kernels.
    """
    total = sum(op.us for op in trace.ops)
    by_module: dict[str, list[Op]] = defaultdict(list)
    for op in trace.ops:
        by_module[op.module].append(op)
    modules = [
        {
            "module": name,
            **_time(ops, trace.steps, total),
            **_rates(work.get(name), sum(op.us for op in ops) / trace.steps, ceiling),
            "kernels": _kernels(ops, trace.steps, total),
        }
        for name, ops in by_module.items()
    ]
    modules.sort(key=lambda entry: -entry["us"])
    return {**_time(trace.ops, trace.steps, total), **busy_figures(trace), "modules": modules}


def busy_figures(trace: StepTrace) -> dict[str, Any]:
    """``span_us`` from a step's first operation to the end of its last, how long the device was ``busy_us``,
    and the gaps between: the device waited for the host.
    """
    span = busy = 0.0
    gaps: list[tuple[float, str]] = []
    for step in range(trace.steps):
        ops = [op for op in trace.ops if op.step == step]
        if not ops:
            continue
        end = ops[0].start
        for op in ops:
            if op.start > end:
                gaps.append((op.start - end, op.module))
            busy += max(op.end - max(op.start, end), 0.0)
            end = max(end, op.end)
        span += end - ops[0].start
    longest = max(gaps, default=(0.0, None))
    return {
        "span_us": _per_step(span, trace.steps),
        "busy_us": _per_step(busy, trace.steps),
        "gaps": {
            "us": _per_step(span - busy, trace.steps),
            "count": round(len(gaps) / trace.steps, 1),
            "share": round((span - busy) / span, 4) if span else 0.0,
            "longest_us": round(longest[0], 3),
            "longest_before": longest[1],
        },
    }


def _kernels(ops: Sequence[Op], steps: int, total: float) -> list[dict[str, Any]]:
    by_name: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        by_name[op.name].append(op)
    found = [{"kernel": name, **_time(own, steps, total)} for name, own in by_name.items()]
    return sorted(found, key=lambda entry: -entry["us"])


def _time(ops: Sequence[Op], steps: int, total: float) -> dict[str, Any]:
    us = sum(op.us for op in ops)
    launches = round(len(ops) / steps, 2)
    return {"launches": launches, "us": _per_step(us, steps), "share": round(us / total, 4) if total else 0.0}


def _rates(work: LeastWork | None, us: float, ceiling: Ceiling) -> dict[str, Any]:
    """GB/s, TFLOP/s and the share of the ceiling that limits this work; None for work that nobody counts."""
    if work is None or not us:
        return {"gb_s": None, "tflop_s": None, "bound": None, "share_of_ceiling": None}
    gb_s, tflop_s = work.num_bytes / us / 1e3, work.flops / us / 1e6
    read, multiplied = gb_s / ceiling.read_gb_s, tflop_s / ceiling.matmul_tflop_s
    return {
        "gb_s": round(gb_s, 3),
        "tflop_s": round(tflop_s, 6),
        "bound": "matmul" if multiplied > read else "read",
        "share_of_ceiling": round(max(read, multiplied), 4),
    }


def _per_step(us: float, steps: int) -> float:
    return round(us / steps, 3)
