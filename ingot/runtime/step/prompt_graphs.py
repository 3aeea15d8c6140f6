"""Steps with prompts, alone or beside decodes, as CUDA graphs, one per bucket of tokens and requests.

The GPU is often done with a layer before the host has launched the next one; a replay costs one launch. How
many of a bucket's requests decode is read on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from ingot.runtime.step.capture_room import room_for
from ingot.runtime.step.chosen_products import Forward
from ingot.runtime.step.step_buffer import StepBuffer

PATIENCE = 8  # steps without a graph that lose about as much time as its capture takes


@dataclass
class _Padded:
    """A bucket's step: ``buffer`` and ``batch``, which is in it, and the tokens that it runs with. Without a
    ``graph`` its kernels are launched one by one.
    """

    buffer: StepBuffer
    batch: ForwardBatch
    newest: Newest
    graph: torch.cuda.CUDAGraph | None = None
    record: StepRecord | None = None


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

    Attributes:
        standing_in: whether a step whose bucket has no graph yet takes that of more requests, or is launched
            kernel by kernel, and is captured when this has cost as much as a capture.
        full: whether no graph is captured any more.
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
        self._padded: dict[tuple[int, int], _Padded] = {}
        self._missed: Counter[tuple[int, int]] = Counter()
        self.standing_in = self.full = False

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
        """Logits [last tokens of requests and probes, vocab_size], valid until the next step's run, the
        buffer with their draws, and the tokens that they follow.
        """
        step = self._choose(*self.bucket_of(layout.num_tokens, layout.num_requests))
        step.buffer.fill(layout, draws)
        step.buffer.upload(self.feed)
        if step.graph is None:
            self._compute(step)
            self.forward.observed(self.forward.record)
        else:
            step.graph.replay()
            self.forward.observed(step.record)
        count, newest = layout.num_logits, step.newest
        return self._logits[:count], step.buffer, Newest(newest.ids, newest.places[:count])

    def _choose(self, tokens: int, requests: int) -> _Padded:
        """The step of the bucket, or what stands in for it."""
        wanted = tokens, requests
        if not (self.has_graph(wanted) or self.standing_in or self.full):
            self._capture_if_room(wanted)
        if self.has_graph(wanted):
            return self._padded[wanted]
        for more in self.buckets[self.buckets.index(requests) + 1 :]:
            if self.has_graph((tokens, more)):
                return self._padded[tokens, more]
        self._missed[wanted] += 1
        if self._missed[wanted] > PATIENCE and not self.full:
            self._capture_if_room(wanted)
        return self._step(wanted)

    def _capture_if_room(self, bucket: tuple[int, int]) -> None:
        """Capture a bucket in the middle of traffic; without memory for it none is captured any more."""
        self.full = not room_for(partial(self.capture, bucket), "steps with prompts")

    def warm_up(self, num_requests: int, num_tokens: int) -> None:
        """Capture all buckets for steps of up to so many requests and tokens."""
        for size in self.sizes(num_requests, num_tokens):
            self.capture(size)

    @property
    def captured(self) -> list[tuple[int, int]]:
        """The buckets that have a graph."""
        return [bucket for bucket in self._padded if self.has_graph(bucket)]

    def has_graph(self, bucket: tuple[int, int]) -> bool:
        return bucket in self._padded and self._padded[bucket].graph is not None

    @torch.inference_mode()
    def capture(self, bucket: tuple[int, int]) -> None:
        """Capture a bucket, if it has no graph yet."""
        if self.has_graph(bucket):
            return
        step = self._step(bucket)
        step.buffer.fill(EMPTY)  # a step may have run without a graph: nothing of it is to be written again
        step.buffer.upload()
        self._launch_once(step.buffer, step.batch)
        step.graph, _ = self._recorder.record(partial(self._compute, step))
        step.record = self.forward.record

    @torch.inference_mode()
    def launch_all(self, num_requests: int, num_tokens: int) -> None:
        """Launch every kernel of ``warm_up``, without a graph."""
        for size in self.sizes(num_requests, num_tokens):
            buffer, batch = self._padding(*size)
            try:
                self._launch_once(buffer, batch)
            finally:
                buffer.wait_until_read()

    def sizes(self, num_requests: int, num_tokens: int) -> list[tuple[int, int]]:
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
        spliced = None if self._encoding is None else self._encoding.captured(tokens)
        buffer = prompt_buffer(self.forward, self.device, self.max_seq_len, tokens, requests)
        return buffer, replace(buffer.padded_batch(tokens, self.max_seq_len), spliced=spliced)

    def _step(self, bucket: tuple[int, int]) -> _Padded:
        """The bucket's step, made when it is first needed."""
        if bucket not in self._padded:
            model = self.forward.model
            if not len(self._logits):  # of all buckets: each would keep its own
                shape = (self.forward.most_logits(self.buckets[-1]), model.config.vocab_size)
                self._logits = torch.empty(shape, dtype=model.dtype, device=self.device)
            ids = torch.empty(bucket[0], dtype=torch.int64, device=self.device)
            buffer, batch = self._padding(*bucket)  # last: without memory for the others it would be dropped
            self._padded[bucket] = _Padded(buffer, batch, Newest(ids, batch.logits_indices))
        return self._padded[bucket]

    def _compute(self, step: _Padded) -> None:
        """Compute the logits of what is in the step's buffer."""
        ids, rows = step.newest.ids, len(step.batch.logits_indices)
        ids.copy_(take_tokens(step.batch.input_ids, step.buffer.feed_rows, self.feed.table))
        self._logits[:rows] = self.forward(replace(step.batch, input_ids=ids))
