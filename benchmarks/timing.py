"""What the scripts here share: a CUDA graph's time, and the read ceiling that shares are stated of.

times = graph_us(calls, repeats=20)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

READ_GB_S = 4421.0  # torch.amax over 4 GiB on an H200


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


def compact(tiles: Mapping[str, int]) -> str:
    """Tiles on one short line."""
    return " ".join(f"{name.removeprefix('BLOCK_')}={value}" for name, value in tiles.items())
