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
    graph = captured(calls)
    begun = time.monotonic()
    while time.monotonic() - begun < 3e-3:  # an idle GPU's clocks need a while
        graph.replay()
        torch.cuda.synchronize()
    return sorted(replay_us(graph) for _ in range(repeats))


def captured(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """All ``calls`` as one CUDA graph, after a launch of each: their kernels are compiled by then."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def compact(tiles: Mapping[str, int]) -> str:
    """Tiles on one short line."""
    return " ".join(f"{name.removeprefix('BLOCK_')}={value}" for name, value in tiles.items())
