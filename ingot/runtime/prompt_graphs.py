"""Steps of short prompts as CUDA graphs, one a bucket of tokens and requests.

Owns capture and replay of steps that only compute prompts. Up to some thousand tokens the GPU is done with a
layer before the host has launched the next one; a replay costs one launch. A bucket's graph is captured the
first time that it is needed. Knows nothing of requests beyond a step's rows.

    prompts = PromptGraphs(forward, device, max_seq_len=4096)
    if prompts.fits(step): logits, buffer = prompts.run(step, draws)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.config.step_sizes import REQUEST_BUCKETS, TOKEN_BUCKETS
from ingot.layers.step_record import StepRecord
from ingot.runtime.forward import Forward
from ingot.runtime.recording import Recorder
from ingot.runtime.sampler import RowSampling
from ingot.runtime.scheduler import ScheduledBatch
from ingot.runtime.step_buffer import StepBuffer

# Beyond so many tokens an H200 computes a 7B layer for longer than the host needs to launch it: only the gaps
# between launches are left to win, and padding must cost less than they do.
HOST_BOUND = 1024
FILLED = 0.97


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffer: StepBuffer
    logits: torch.Tensor
    record: StepRecord | None


class PromptGraphs:
    """Captured prompt steps; a step runs in the smallest bucket that holds it, the rest of the rows padding.

    Padding tokens belong to no request: they write to no slot and nobody reads their rows.
    """

    def __init__(self, forward: Forward, device: torch.device, max_seq_len: int) -> None:
        self.forward = forward
        self.device = device
        self.max_seq_len = max_seq_len
        self.block_size = forward.caches[0].block_size
        self._recorder = Recorder(device)
        self._captured: dict[tuple[int, int], _Captured] = {}

    @staticmethod
    def fits(step: ScheduledBatch) -> bool:
        """Whether the step has only prompts, few of them, that want no more than their last logits, and a
        bucket that they fill well enough.
        """
        requests, tokens = step.requests, step.num_tokens
        if len(requests) > REQUEST_BUCKETS[-1] or tokens > TOKEN_BUCKETS[-1] or step.num_single:
            return False
        bucket, _ = bucket_of(tokens, len(requests))
        filled = bucket <= HOST_BOUND or tokens >= FILLED * bucket
        return filled and not any(item.request.all_logits for item in requests)

    def run(self, step: ScheduledBatch, draws: Sequence[RowSampling]) -> tuple[torch.Tensor, StepBuffer]:
        """Logits [requests that reached their last token, vocab_size], valid until the next graph's run, and
        the buffer that holds how they draw.
        """
        captured = self._capture(*bucket_of(step.num_tokens, len(step.requests)))
        captured.buffer.fill(step, self.block_size, draws)
        captured.buffer.upload()
        captured.graph.replay()
        self.forward.observed(captured.record)
        return captured.logits[: sum(item.samples for item in step.requests)], captured.buffer

    @torch.inference_mode()
    def _capture(self, tokens: int, requests: int) -> _Captured:
        if (tokens, requests) in self._captured:
            return self._captured[tokens, requests]
        width = -(-self.max_seq_len // self.block_size)
        sizes, encoded = (tokens, requests, width, requests), self.forward.encoded_positions
        buffer = StepBuffer(*sizes, self.device, 0, encoded, self.block_size)
        buffer.fill(ScheduledBatch(), self.block_size)
        buffer.upload()
        batch = buffer.padded_batch(tokens, self.max_seq_len)
        self.forward(batch)  # compiles kernels and fills workspaces outside of the capture
        graph, logits = self._recorder.record(lambda: self.forward(batch))
        self._captured[tokens, requests] = _Captured(graph, buffer, logits, self.forward.record)
        return self._captured[tokens, requests]


def bucket_of(num_tokens: int, num_requests: int) -> tuple[int, int]:
    """The smallest buckets of tokens and of requests that hold these."""
    tokens = TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, num_tokens)]
    return tokens, REQUEST_BUCKETS[bisect_left(REQUEST_BUCKETS, num_requests)]
