"""Decode steps as CUDA graphs, one per batch bucket and kind of sampling, captured when first needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ingot.config.step_sizes import DRAW_KINDS, SPEECH_KINDS, batch_buckets
from ingot.kernels.sampling.feed_tokens import take_tokens
from ingot.layers.forward_batch import ForwardBatch
from ingot.layers.step_layout import StepLayout
from ingot.layers.step_record import StepRecord
from ingot.runtime.encoding.child_graph import add_child
from ingot.runtime.encoding.recording import Recorder
from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import Newest, RowSampling
from ingot.runtime.step.capture_room import room_for
from ingot.runtime.step.chosen_products import Forward
from ingot.runtime.step.sampled_step import leave_tokens, sampled_step
from ingot.runtime.step.step_buffer import StepBuffer

GREEDY = (RowSampling(),)
FILTERED = (RowSampling(temperature=1.0, top_k=1, top_p=0.5),)
UNFILTERED = (RowSampling(temperature=1.0),)
PENALIZED = (FILTERED[0]._replace(slot=0),)
MASKED = (PENALIZED[0]._replace(mask=0),)
GREEDY_LOGPROBS = (RowSampling(logprobs=True, likeliest=True),)
LOGPROBS = (MASKED[0]._replace(logprobs=True, likeliest=True),)
TRANSCRIPT = (RowSampling(transcript=0, logprobs=True),)
EVERYTHING = (LOGPROBS[0]._replace(transcript=0),)
_OF_TEXT = (GREEDY, UNFILTERED, FILTERED, PENALIZED, MASKED, GREEDY_LOGPROBS, LOGPROBS)
KINDS = dict(zip(DRAW_KINDS, _OF_TEXT, strict=True))
KINDS |= dict(zip(SPEECH_KINDS, (TRANSCRIPT, EVERYTHING), strict=True))

PATIENCE = 64  # steps in a larger bucket that lose about as much time as a capture takes


def sampling_kind(draws: Sequence[RowSampling]) -> tuple[RowSampling, ...]:
    """The least general kind of sampling that does all rows' work; each has a graph of its own.

    A min-p needs no kind of its own: every draw applies it. Penalties filter, too, masks penalize, and
    log-probabilities of draws do everything but transcripts: more kinds would save microseconds and cost
    graphs.
    """
    plain = all(d.temperature == 0 and d.slot < 0 and d.mask < 0 for d in draws)
    if any(d.transcript >= 0 for d in draws):
        return TRANSCRIPT if plain and not any(d.likeliest for d in draws) else EVERYTHING
    if any(d.logprobs for d in draws):
        return GREEDY_LOGPROBS if plain else LOGPROBS
    if any(d.mask >= 0 for d in draws):
        return MASKED
    if any(d.slot >= 0 for d in draws):
        return PENALIZED
    drawing = [d for d in draws if d.temperature > 0]
    if not drawing:
        return GREEDY
    return FILTERED if any(d.top_k or d.top_p < 1 for d in drawing) else UNFILTERED


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor | None
    record: StepRecord | None


class DecodeGraphs:
    """Captured decode steps; a batch runs in the smallest bucket that holds it, the other rows padding.

    Attributes:
        standing_in: whether a batch whose bucket has no graph yet takes that of a larger one, and its bucket
            is captured when this has cost as much as a capture.
        full: whether graphs are captured only for batches that no captured one holds.
    """

    def __init__(
        self, forward: Forward, feed: TokenFeed, device: torch.device, max_batch_size: int, max_seq_len: int
    ) -> None:
        self.forward = forward
        self.feed = feed
        self.device = device
        self.max_seq_len = max_seq_len
        self.block_size = forward.caches[0].block_size
        self.buckets = batch_buckets(max_batch_size)
        self._buffers: dict[int, StepBuffer] = {}
        self._captured: dict[tuple[int, tuple[RowSampling, ...] | None], _Captured] = {}
        self._recorder = Recorder(device)
        self._missed: Counter[int] = Counter()
        self._without: set[tuple[int, tuple[RowSampling, ...] | None]] = set()  # there was no memory for them
        self.standing_in = self.full = False

    def fits(self, num_requests: int) -> bool:
        return num_requests <= self.buckets[-1]

    def bucket_of(self, num_requests: int) -> int:
        return next(b for b in self.buckets if b >= num_requests)

    def logits(self, layout: StepLayout) -> torch.Tensor:
        """Logits [requests, vocab_size]; valid until the next run: buckets share memory."""
        found = self._replay(layout, (), None)
        assert found is not None
        return found[: layout.num_requests]

    def launch(self, layout: StepLayout, draws: Sequence[RowSampling]) -> None:
        """Start a step that leaves its requests' tokens in the first rows of the feed's table."""
        self._replay(layout, draws, sampling_kind(draws))

    @torch.inference_mode()
    def launch_all(self, sizes: Iterable[int], kinds: Iterable[str]) -> None:
        """Launch every kernel of ``warm_up`` of these sizes, without a graph."""
        for bucket in sorted({self.bucket_of(size) for size in sizes}):
            self._launch_once(bucket, [KINDS[kind] for kind in kinds])

    def warm_up(self, num_requests: int, kinds: Iterable[str]) -> None:
        """Capture the steps of the bucket for this many requests and of these ``KINDS`` of sampling."""
        bucket, wanted = self.bucket_of(num_requests), [KINDS[kind] for kind in kinds]
        for kind in wanted[:1]:
            self._capture(bucket, kind)
        missing = [kind for kind in wanted if (bucket, kind) not in self._captured]
        if len(missing) > 1:
            self._capture_sharing(bucket, missing)
        for kind in missing:
            self._capture(bucket, kind)

    def _replay(
        self, layout: StepLayout, draws: Sequence[RowSampling], kind: tuple[RowSampling, ...] | None
    ) -> torch.Tensor | None:
        bucket, captured = self._graph_for(layout.num_requests, kind)
        buffer = self._buffer(bucket)
        buffer.fill(layout, draws)
        buffer.upload(self.feed)
        if captured is None:
            logits = self._compute(kind, buffer, buffer.padded_batch(1, self.max_seq_len))
            self.forward.observed(self.forward.record)
            return logits
        captured.graph.replay()
        self.forward.observed(captured.record)
        return captured.logits

    def _graph_for(
        self, num_requests: int, kind: tuple[RowSampling, ...] | None
    ) -> tuple[int, _Captured | None]:
        """The bucket that runs a batch, and its graph, which is captured if there is none. Without memory for
        it, a larger batch's or none.
        """
        wanted = self._choose(num_requests, kind), kind
        if wanted in self._captured or wanted in self._without:
            return wanted[0], self._captured.get(wanted)
        if not room_for(partial(self._capture, *wanted), "decode steps", is_news=not self.full):
            self.full = True
            self._without.add(wanted)
            wanted = self._choose(num_requests, kind), kind
        return wanted[0], self._captured.get(wanted)

    def _choose(self, num_requests: int, kind: tuple[RowSampling, ...] | None) -> int:
        """The bucket whose graph is to run a batch of this kind."""
        wanted = self.bucket_of(num_requests)
        if (wanted, kind) in self._captured or not (self.standing_in or self.full):
            return wanted
        self._missed[wanted] += 1
        if self._missed[wanted] > PATIENCE and not self.full:
            return wanted
        return next(
            (more for more in self.buckets if more > wanted and (more, kind) in self._captured), wanted
        )

    def _buffer(self, bucket: int) -> StepBuffer:
        if bucket not in self._buffers:
            width = -(-self.max_seq_len // self.block_size)
            kv_heads = self.forward.caches[0].num_kv_heads
            sizes, encoded = (bucket, bucket, width, bucket), self.forward.encoded_positions
            self._buffers[bucket] = StepBuffer(*sizes, self.device, kv_heads, encoded, self.block_size)
        return self._buffers[bucket]

    def _launch_once(self, bucket: int, kinds: Iterable[tuple[RowSampling, ...]]) -> None:
        """Launch every kernel of the bucket's steps: it builds and loads them, fills workspaces and makes the
        token counts, none of which a capture may do.
        """
        buffer = self._buffer(bucket)
        buffer.fill_padding()
        buffer.upload(self.feed)
        batch = buffer.padded_batch(1, self.max_seq_len)
        table = self.feed.table.clone()
        try:
            ids = take_tokens(batch.input_ids, buffer.feed_rows, self.feed.table)
            logits = self.forward.launch_some(replace(batch, input_ids=ids))
            for kind in kinds:
                draws = buffer.draws(bucket, kind)
                leave_tokens(logits, draws, self.feed, Newest(ids, batch.logits_indices))
        finally:
            self.feed.table.copy_(table)  # the newest tokens, which are overwritten

    @torch.inference_mode()
    def _capture_sharing(self, bucket: int, kinds: Sequence[tuple[RowSampling, ...]]) -> None:
        """``_capture`` of several kinds, whose graphs begin with copies of one graph of the model. The first
        kernel that draws starts a few microseconds later than in a graph of its own.
        """
        self._launch_once(bucket, kinds)
        buffer = self._buffers[bucket]
        batch = buffer.padded_batch(1, self.max_seq_len)

        def run_model() -> tuple[torch.Tensor, torch.Tensor]:
            ids = take_tokens(batch.input_ids, buffer.feed_rows, self.feed.table)
            return ids, self.forward(replace(batch, input_ids=ids))

        start, (ids, logits) = self._recorder.record_start(run_model)
        newest = Newest(ids, batch.logits_indices)

        def run(kind: tuple[RowSampling, ...]) -> None:
            add_child(start)
            leave_tokens(logits, buffer.draws(bucket, kind), self.feed, newest)

        for kind in kinds:
            graph, _ = self._recorder.record(partial(run, kind))
            self._captured[bucket, kind] = _Captured(graph, None, self.forward.record)

    @torch.inference_mode()
    def _capture(self, bucket: int, kind: tuple[RowSampling, ...] | None) -> _Captured:
        if (bucket, kind) in self._captured:
            return self._captured[bucket, kind]
        self._launch_once(bucket, [] if kind is None else [kind])
        buffer = self._buffers[bucket]
        batch = buffer.padded_batch(1, self.max_seq_len)
        graph, logits = self._recorder.record(partial(self._compute, kind, buffer, batch))
        self._captured[bucket, kind] = _Captured(graph, logits, self.forward.record)
        return self._captured[bucket, kind]

    def _compute(
        self, kind: tuple[RowSampling, ...] | None, buffer: StepBuffer, batch: ForwardBatch
    ) -> torch.Tensor | None:
        """Compute what is in a bucket's buffer: its logits, or the tokens that the feed gets."""
        if kind is None:
            return self.forward(batch)
        draws = buffer.draws(len(batch.logits_indices), kind)
        sampled_step(self.forward, batch, buffer.feed_rows, draws, self.feed)
        return None
