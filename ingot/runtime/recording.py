"""Recording of launches as a CUDA graph.

Owns the capture itself. Knows nothing of what is launched.

    graph, output = record(run, pool, device)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Output = TypeVar("Output")


def record(run: Callable[[], Output], pool: Any, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Output]:
    """A graph of what ``run`` launches, and what it returned; call it once before, so that kernels are built.

    ``pool`` is of ``torch.cuda.graph_pool_handle()``: graphs of one pool share memory.

    Not by ``torch.cuda.graph``, which collects garbage and empties the allocator's cache at every capture.
    """
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            output = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, output
