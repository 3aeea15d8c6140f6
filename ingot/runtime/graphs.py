"""Decode steps as CUDA graphs, one a batch bucket.

Owns capture and replay of the model over static buffers. A bucket's graph is captured the first time that it
is needed. Knows nothing of requests beyond a step's rows.

    graphs = DecodeGraphs(forward, device, max_batch_size=64, max_seq_len=4096)
    logits = graphs.run(step, block_size)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.runtime.forward import Forward
from ingot.runtime.scheduler import ScheduledBatch
from ingot.runtime.step_buffer import StepBuffer


def batch_buckets(max_batch_size: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to the first that holds the largest batch."""
    buckets = [1, 2, 4]
    while buckets[-1] < max_batch_size:
        buckets.append(8 if buckets[-1] == 4 else buckets[-1] + 8)
    return [b for i, b in enumerate(buckets) if i == 0 or buckets[i - 1] < max_batch_size]


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffer: StepBuffer
    logits: torch.Tensor


class DecodeGraphs:
    """Captured decode steps; a batch runs in the smallest bucket that holds it, the rest of the rows
    padding.
    """

    def __init__(self, forward: Forward, device: torch.device, max_batch_size: int, max_seq_len: int) -> None:
        self.forward = forward
        self.device = device
        self.max_seq_len = max_seq_len
        self.buckets = batch_buckets(max_batch_size)
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def fits(self, num_requests: int) -> bool:
        """Whether a bucket holds this many requests."""
        return num_requests <= self.buckets[-1]

    def run(self, step: ScheduledBatch, block_size: int) -> torch.Tensor:
        """Logits [requests, vocab_size]; valid until the next run: buckets share memory."""
        count = len(step.requests)
        bucket = next(b for b in self.buckets if b >= count)
        captured = self._capture(bucket)
        captured.buffer.fill(step, block_size)
        captured.buffer.upload()
        captured.graph.replay()
        return captured.logits[:count]

    @torch.inference_mode()
    def _capture(self, bucket: int) -> _Captured:
        if bucket in self._captured:
            return self._captured[bucket]
        block_size = self.forward.caches[0].block_size
        width = -(-self.max_seq_len // block_size)
        buffer = StepBuffer(bucket, bucket, width, bucket, self.device, self.forward.caches[0].num_kv_heads)
        buffer.fill(ScheduledBatch(), block_size)
        buffer.host["query_start"][:] = range(bucket + 1)
        buffer.host["logits_indices"][:] = range(bucket)
        buffer.upload()
        batch = buffer.batch(1, self.max_seq_len)
        self.forward(batch)  # compiles kernels and fills workspaces outside of the capture
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self.forward(batch)
        self._captured[bucket] = _Captured(graph, buffer, logits)
        return self._captured[bucket]
