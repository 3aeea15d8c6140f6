"""Steps with prompts, alone or beside decodes, as CUDA graphs, one per bucket of tokens and requests.

The GPU is often done with a layer before the host has launched the next one; a replay costs one launch. How
many of a bucket's requests decode is read on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ingot.config.step_sizes import TOKEN_BUCKETS, request_buckets
from ingot.kernels.sampling.feed_tokens import take_tokens
from ingot.kernels.tiles.prefill_tiles import most_parts
from ingot.layers.decoder import DecoderLayer
from ingot.layers.forward_batch import ForwardBatch
from ingot.layers.step_layout import StepLayout
from ingot.layers.step_record import StepRecord
from ingot.runtime.encoding.input_encoding import Encoding
from ingot.runtime.encoding.recording import Recorder
from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import Newest, RowSampling
from ingot.runtime.scheduling.scheduled_batch import EMPTY
from ingot.runtime.step.chosen_products import Forward
from ingot.runtime.step.step_buffer import StepBuffer


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffer: StepBuffer
    newest: Newest
    record: StepRecord | None


def prompt_buffer(
    forward: Forward, device: torch.device, max_seq_len: int, tokens: int, requests: int
) -> StepBuffer:
    """An uploaded buffer, all padding, for steps of so many tokens and requests."""
    layer, cache = forward.model.layers[0], forward.caches[0]
    assert isinstance(layer, DecoderLayer)
    rows = layer.self_attn.tile_rows(tokens, cache, forward.model.dtype)
    buffer = StepBuffer(
        *(tokens, requests, -(-max_seq_len // cache.block_size), forward.most_logits(requests), device),
        num_kv_heads=cache.num_kv_heads,
        encoded_positions=forward.encoded_positions,
        block_size=cache.block_size,
        tile_rows=rows,
        tile_parts=most_parts(layer.self_attn.config.num_heads, tokens, rows),
    )
    buffer.fill(EMPTY)
    buffer.upload()
    return buffer


class PromptGraphs:
    """Captured steps; a step runs in the smallest bucket that holds it, the other rows padding.

    Padding tokens belong to no request: they write to no slot and their rows are not read.
    """

    def __init__(
        self,
        forward: Forward,
        feed: TokenFeed,
        device: torch.device,
        max_batch_size: int,
        max_seq_len: int,
        encoding: Encoding | None = None,
    ) -> None:
        self.forward = forward
        self._encoding = encoding
        self.feed = feed
        self.device = device
        self.max_seq_len = max_seq_len
        self.cache = forward.caches[0]
        self.buckets = request_buckets(max_batch_size)
        self._logits = torch.empty(0)
        self._recorder = Recorder(device)
        self._captured: dict[tuple[int, int], _Captured] = {}

    def fits(self, layout: StepLayout) -> bool:
        """Whether a bucket holds the step, and none of its requests wants more than its last logits."""
        if layout.num_requests > self.buckets[-1] or layout.num_tokens > TOKEN_BUCKETS[-1]:
            return False
        return max(layout.wanted, default=0) <= 1

    def bucket_of(self, num_tokens: int, num_requests: int) -> tuple[int, int]:
        tokens = TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, num_tokens)]
        return tokens, self.buckets[bisect_left(self.buckets, num_requests)]

    def run(
        self, layout: StepLayout, draws: Sequence[RowSampling]
    ) -> tuple[torch.Tensor, StepBuffer, Newest]:
        """Logits [last tokens of requests and probes, vocab_size], valid until the next graph's run, the
        buffer with their draws, and the tokens that they follow.
        """
        captured = self._capture(*self.bucket_of(layout.num_tokens, layout.num_requests))
        captured.buffer.fill(layout, draws)
        captured.buffer.upload()
        captured.graph.replay()
        self.forward.observed(captured.record)
        count, newest = layout.num_logits, captured.newest
        return self._logits[:count], captured.buffer, Newest(newest.ids, newest.places[:count])

    def warm_up(self, num_requests: int, num_tokens: int) -> None:
        """Capture all buckets for steps of up to so many requests and tokens."""
        for size in self._sizes(num_requests, num_tokens):
            self._capture(*size)

    @torch.inference_mode()
    def launch_all(self, num_requests: int, num_tokens: int) -> None:
        """Launch every kernel of ``warm_up``, without a graph."""
        for size in self._sizes(num_requests, num_tokens):
            self._launch_once(*self._padding(*size))

    def _sizes(self, num_requests: int, num_tokens: int) -> list[tuple[int, int]]:
        """The buckets of steps of up to so many requests and tokens."""
        tokens, requests = self.bucket_of(
            min(num_tokens, TOKEN_BUCKETS[-1]), min(num_requests, self.buckets[-1])
        )
        sizes = TOKEN_BUCKETS[: TOKEN_BUCKETS.index(tokens) + 1]
        return [(size, most) for size in sizes for most in self.buckets[: self.buckets.index(requests) + 1]]

    def _launch_once(self, buffer: StepBuffer, batch: ForwardBatch) -> None:
        """Launch every kernel of a step, before its capture: builds and loads them, fills workspaces."""
        ids = take_tokens(batch.input_ids, buffer.feed_rows, self.feed.table)
        self.forward.launch_some(replace(batch, input_ids=ids))

    def _padding(self, tokens: int, requests: int) -> tuple[StepBuffer, ForwardBatch]:
        """An uploaded buffer of this bucket, all padding, and its step."""
        buffer = prompt_buffer(self.forward, self.device, self.max_seq_len, tokens, requests)
        batch = buffer.padded_batch(tokens, self.max_seq_len)
        if self._encoding is not None:
            batch = replace(batch, spliced=self._encoding.captured(tokens))
        return buffer, batch

    @torch.inference_mode()
    def _capture(self, tokens: int, requests: int) -> _Captured:
        if (tokens, requests) in self._captured:
            return self._captured[tokens, requests]
        buffer, batch = self._padding(tokens, requests)
        model = self.forward.model
        if not len(self._logits):  # of all graphs: each would keep its own
            shape = (self.forward.most_logits(self.buckets[-1]), model.config.vocab_size)
            self._logits = torch.empty(shape, dtype=model.dtype, device=self.device)
        ids = torch.empty_like(batch.input_ids)

        def run() -> None:
            ids.copy_(take_tokens(batch.input_ids, buffer.feed_rows, self.feed.table))
            self._logits[: len(batch.logits_indices)] = self.forward(replace(batch, input_ids=ids))

        self._launch_once(buffer, batch)
        graph, _ = self._recorder.record(run)
        newest = Newest(ids, batch.logits_indices)
        self._captured[tokens, requests] = _Captured(graph, buffer, newest, self.forward.record)
        return self._captured[tokens, requests]
