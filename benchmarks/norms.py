"""RMSNorm and LayerNorm in a CUDA graph, beside PyTorch's: rows of 4096 fp16, with and without residual sum.

Times are a graph of many launches divided by their number, median and p90 of many replays. ``cold``: every
launch reads and writes its own tensors, together far more than the 50 MB of L2. ``warm``: all launches have
the same ones. ``overlap``: programmatic dependent launch, a kernel starts while the one before ends. The
floor is the bytes at 4258 GB/s (copy, measured on an H200).

    python benchmarks/norms.py --json docs/results/rms_norm.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ingot.kernels.norm.layer_norm import layer_norm
from ingot.kernels.norm.rms_norm import rms_norm

HIDDEN, GBPS = 4096, 4258.0
ROWS = (1, 8, 1024, 2048, 16384)
COLD_BYTES = 400 << 20

Call = Callable[[torch.Tensor, torch.Tensor], Any]


def graph_us(calls: Sequence[Callable[[], Any]], keep: bool, replays: int = 30) -> tuple[float, float]:
    """Median and p90 µs of one call of a captured sequence; ``keep`` gives every call results of its own."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() if keep else _drop(call()) for call in calls]
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(kept))
    times.sort()
    return round(times[len(times) // 2], 2), round(times[int(0.9 * (len(times) - 1))], 2)


def _drop(result: object) -> None:
    """Free a result, so that the next call writes into the same memory."""


def implementations() -> dict[str, tuple[Call, int]]:
    """By name: a call of (x, residual), and how many tensors of x's size it reads and writes."""
    weight = torch.randn(HIDDEN, device="cuda", dtype=torch.float16)
    found: dict[str, tuple[Call, int]] = {
        "F.rms_norm": (lambda x, r: F.rms_norm(x, (HIDDEN,), weight, 1e-6), 2),
        "F.layer_norm": (lambda x, r: F.layer_norm(x, (HIDDEN,), weight, weight, 1e-5), 2),
    }
    for name, overlap in (("", 1), (", overlap", 2)):
        tiles = {"OVERLAP": overlap}
        found |= {
            f"rms_norm{name}": (lambda x, r, t=tiles: rms_norm(x, weight, 1e-6, None, t), 2),
            f"rms_norm + residual{name}": (lambda x, r, t=tiles: rms_norm(x, weight, 1e-6, r, t), 4),
            f"layer_norm + residual{name}": (
                lambda x, r, t=tiles: layer_norm(x, weight, weight, 1e-5, r, t),
                4,
            ),
        }
    return found


def measure(rows: int) -> list[dict[str, Any]]:
    """Every implementation at this many rows."""
    copies = max(min(COLD_BYTES // (rows * HIDDEN * 4), 256), 3)
    pairs = [
        tuple(torch.randn(rows, HIDDEN, device="cuda", dtype=torch.float16) for _ in range(2))
        for _ in range(copies)
    ]
    found = []
    for name, (call, tensors) in implementations().items():
        cold = graph_us([lambda p=pair, c=call: c(*p) for pair in pairs], keep=True)  # type: ignore[misc]
        warm = graph_us([lambda p=pairs[0], c=call: c(*p)] * max(copies, 20), keep=False)  # type: ignore[misc]
        found.append(
            {
                "rows": rows,
                "op": name,
                "cold_us_median": cold[0],
                "cold_us_p90": cold[1],
                "warm_us_median": warm[0],
                "warm_us_p90": warm[1],
                "floor_us": round(tensors * rows * HIDDEN * 2 / GBPS / 1e3, 2),
            }
        )
        print(found[-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure all and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "hidden": HIDDEN,
        "norms": [row for rows in ROWS for row in measure(rows)],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
