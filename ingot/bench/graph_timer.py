"""Microseconds of calls inside a CUDA graph.

Owns the warm-up and the many readings of the tuner's clock. Knows no kernel.

    times = graph_us(lambda i: op(weights[i % 8]), calls=24)      # µs of one call, one value a replay
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ingot.engine.tuner.timing import GraphTimer

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
    measure = GraphTimer().prepare([partial(call, i) for i in range(calls)])
    return [measure() for _ in range(replays)]
