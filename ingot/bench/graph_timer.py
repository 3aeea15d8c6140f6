"""Microseconds of calls inside a CUDA graph.

Owns capture, replay and the clock. Inside a graph nothing waits for the host, as in a decode step. Knows no
kernel.

    times = graph_us(lambda i: op(weights[i % 8]), calls=24)      # µs of one call, one value a replay
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Call = Callable[[int], object]
REPLAYS = 20


def graph_us(call: Call, calls: int, replays: int = REPLAYS) -> list[float]:
    """Microseconds of one call, averaged over the graph's ``calls``; one value a replay.

    ``call(i)`` launches the work on inputs number i.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels and makes workspaces outside of the capture
        call(0)
        call(calls - 1)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return times
