"""Captures launches as CUDA graphs that share memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Output = TypeVar("Output")
_ONE_CAPTURE = threading.Lock()


@contextmanager
def _without_collection() -> Iterator[None]:
    """One block at a time, in which no garbage is collected: freeing a graph would end the capture."""
    with _ONE_CAPTURE:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


class Recorder:
    """Captures graphs of one family: memory that one of them frees, the next ones use again.

    All on one stream: PyTorch's allocator gives a freed block only to its own stream, also within a pool, and
    the matrix library has a workspace for each stream that it has met (32 MiB on an H200).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        """A graph of what ``run`` launches, and what it returned; call it once before, to build kernels."""
        (graph,), output = self.record_parts(lambda cut: run())
        return graph, output

    def record_start(self, run: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        """``record``, for a graph that is not replayed but begins others: ``add_child`` puts it into them.
        What ``run`` returned is theirs to read; hold on to it until the last of them is captured.
        """
        (graph,), output = self.record_parts(lambda cut: run(), keep=True)
        return graph, output

    def record_parts(
        self, run: Callable[[Callable[[], None]], Output], *, keep: bool = False
    ) -> tuple[list[torch.cuda.CUDAGraph], Output]:
        """``record``, where ``run`` calls its argument to end a graph and begin the next one; they are
        replayed in order, and none of the family between them. ``keep``: leave them as ``add_child`` needs.

        ``torch.cuda.graph`` would collect garbage first, and empty the allocator's cache each time.
        """
        torch.cuda.synchronize(self._device)
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph(keep_graph=keep))
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with _without_collection(), torch.cuda.stream(self._stream):
            begin()
            try:
                output = run(cut)
            finally:
                graphs[-1].capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graphs, output
