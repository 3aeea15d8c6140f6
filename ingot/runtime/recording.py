"""Recording of launches as CUDA graphs that share memory.

Owns the capture itself, and the memory pool and the stream of a family of graphs. Knows nothing of what is
launched.

    recorder = Recorder(device)
    graph, output = recorder.record(run)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Output = TypeVar("Output")


class Recorder:
    """Captures graphs of one family: what one of them frees, the next ones use again.

    All on one stream: PyTorch's allocator gives a freed block to its own stream only, also within a pool, and
    the matrix library has a workspace for each stream that it has met (32 MiB on an H200).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        """A graph of what ``run`` launches, and what it returned; call it once before, so that kernels are
        built.

        Not by ``torch.cuda.graph``, which collects garbage and empties the allocator's cache each time.
        """
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph, output
