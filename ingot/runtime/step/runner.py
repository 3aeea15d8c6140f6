"""Runs scheduled steps: KV cache, buffers, graphs; logits or tokens come out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from ingot.config.step_sizes import batch_buckets, most_tokens
from ingot.kernels.built_ahead import built_ahead
from ingot.layers.decoder import Decoder
from ingot.layers.decoder_forward import fuses
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.step_layout import StepLayout
from ingot.runtime.encoding.encoder_line import EncoderLine
from ingot.runtime.encoding.input_encoding import Encoding
from ingot.runtime.encoding.prompt_rows import rows_of
from ingot.runtime.sampling.pending_tokens import TokenFeed, TokensInFlight
from ingot.runtime.sampling.sampler import RowSampling
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.scheduling.pace import Pace
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.step.chosen_products import Forward
from ingot.runtime.step.cross_scores import ScoreReader, Scores
from ingot.runtime.step.graphs import DecodeGraphs, sampling_kind
from ingot.runtime.step.layered_chunk import LayeredChunk
from ingot.runtime.step.prompt_graphs import PromptGraphs
from ingot.runtime.step.sampled_step import leave_tokens, sampled_step
from ingot.runtime.step.step_buffer import StepBuffer


def make_caches(
    model: Decoder, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> list[LayerCache]:
    """Zeroed keys and values of every layer, in ``dtype``: the model's, or 8 bits."""
    config = model.config
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    return [LayerCache.zeros(*shape, dtype, device) for _ in range(config.num_layers)]


class Runner:
    """Runs steps of one model on one device.

    While ``eager`` is set, graphs and fused kernels are off, so that hooks on modules fire. ``encoding`` is
    None for a model without an encoder, ``pace`` where no step has layers of a chunk.
    """

    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        device: torch.device,
        *,
        max_batch_size: int,
        max_seq_len: int,
        token_budget: int,
        cuda_graphs: bool,
        fused_decode: bool = True,
        encoding: Encoding | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.model = model
        self.encoding = encoding
        self.line = None if encoding is None else EncoderLine(encoding, device)
        self.caches = caches
        able = device.type == "cuda" and fuses(model)
        self.forward = Forward(model, caches, fused=fused_decode and able)
        self.device = device
        self.max_seq_len = max_seq_len
        self.block_size = caches[0].block_size
        counts = TokenCounts(max_batch_size, model.config.vocab_size, max_seq_len, device)
        rows = batch_buckets(max_batch_size)[-1]  # a graph writes its padding too
        self.feed = TokenFeed(self.forward.most_logits(rows), counts)
        self.most_tokens = most_tokens(token_budget, max_batch_size)
        self._requests = max_batch_size
        self._buffer: StepBuffer | None = None
        self.layered = None if pace is None else LayeredChunk(self.forward, pace, device, max_seq_len)
        use_graphs = cuda_graphs and device.type == "cuda"
        parts = (self.forward, self.feed, device, max_batch_size, max_seq_len)
        self.graphs = DecodeGraphs(*parts) if use_graphs else None
        self.prompts = PromptGraphs(*parts, encoding) if use_graphs else None

    @property
    def eager(self) -> bool:
        return self.forward.by_module

    @eager.setter
    def eager(self, value: bool) -> None:
        self.forward.by_module = value

    @torch.inference_mode()
    def run(self, step: ScheduledBatch) -> torch.Tensor:
        """Logits of the step's wanted tokens, [L, vocab_size] in the model's dtype.

        A request that wants all logits gets a row for each of its tokens, one that reaches its last token
        gets one, others none; rows follow the step's order, and after them come those of probes.
        """
        with self._work_behind(step):
            graphable = self._prepare(step)
            layout = step.layout
            if self.graphs is not None and graphable and self._decodes(layout, self.graphs):
                return self.graphs.logits(layout)
            if self.prompts is not None and graphable and self.prompts.fits(layout):
                return self.prompts.run(layout, ())[0]
            logits = self.forward(self._eager_batch(step, ()))
            self.forward.observed(self.forward.record)
            return logits

    @torch.inference_mode()
    def run_reading(self, step: ScheduledBatch) -> tuple[torch.Tensor, torch.Tensor, Scores]:
        """``run``, without a graph; the hidden states of all the step's tokens after the final norm, [T,
        hidden_size] in the model's dtype; and the scores that requests want of cross-attention.
        """
        with self._work_behind(step):
            self._prepare(step)
            batch, scores = self._eager_batch(step, ()), Scores()
            if any(item.request.heads for item in step.requests):
                reader = ScoreReader(step, self.caches, self.model.config.attention_scale)
                batch, scores = replace(batch, observer=reader), reader.scores
            logits, hidden = self.forward.with_hidden(batch)
            self.forward.observed(self.forward.record)
            return logits, hidden, scores

    @torch.inference_mode()
    def launch(self, step: ScheduledBatch, draws: Sequence[RowSampling]) -> TokensInFlight:
        """Start a step and the drawing of its tokens; nothing waits for the device.

        Requests with pending tokens read them where the step before left them: ``draws`` has a row for each
        request that samples, in the order of the step and of the tokens; then one for each probe.
        """
        with self._work_behind(step):
            graphable = self._prepare(step)
            layout = step.layout
            if self.graphs is not None and graphable and self._decodes(layout, self.graphs):
                self.graphs.launch(layout, draws)
            elif self.prompts is not None and graphable and self.prompts.fits(layout):
                logits, buffer, newest = self.prompts.run(layout, draws)
                leave_tokens(logits, buffer.draws(len(draws), self._way(draws)), self.feed, newest)
            else:
                batch = self._eager_batch(step, draws)
                buffer = self._eager_buffer()
                values = buffer.draws(len(draws), self._way(draws))
                sampled_step(self.forward, batch, buffer.feed_rows[: layout.num_tokens], values, self.feed)
                self.forward.observed(self.forward.record)
            logprobs, likeliest = any(d.logprobs for d in draws), any(d.likeliest for d in draws)
            return self.feed.send(len(draws), logprobs=logprobs, likeliest=likeliest)

    @torch.inference_mode()
    def run_behind(self, step: ScheduledBatch) -> None:
        """Start what follows a step that has no requests; nothing waits for the device."""
        with self._work_behind(step):
            self._prepare(step)

    def forget_inputs(self) -> None:
        """Forget inputs that are encoded in parts: a step has failed."""
        if self.line is not None:
            self.line.clear()

    def warm_up(self, batch_sizes: Iterable[int], kinds: Sequence[str]) -> None:
        """Capture the graphs for batches of these sizes and kinds of sampling, and for the prompts that join
        them, if graphs are used. Build the kernels of chunks that go layer by layer.
        """
        sizes = [size for size in batch_sizes if self.graphs is not None and self.graphs.fits(size)]
        with built_ahead():
            if self.graphs is not None:
                self.graphs.launch_all(sizes, kinds)
            if self.prompts is not None and sizes:
                self.prompts.launch_all(max(sizes), self.most_tokens)
            if self.layered is not None:
                self.layered.launch_all()
        for size in sizes:
            assert self.graphs is not None
            self.graphs.warm_up(size, kinds)
        if self.prompts is not None and sizes:
            self.prompts.warm_up(max(sizes), self.most_tokens)
        if self.layered is not None:
            self.layered.warm_up()

    @contextmanager
    def _work_behind(self, step: ScheduledBatch) -> Iterator[None]:
        """Layers of a chunk and parts of an encoding follow what the block launches."""
        with ExitStack() as behind:
            if self.line is not None:
                behind.enter_context(self.line.behind(step, fused=self.forward.fused))
            if self.layered is not None:
                behind.enter_context(self.layered.behind(step))
            yield

    def _prepare(self, step: ScheduledBatch) -> bool:
        """Do what a step needs beforehand; returns whether it may replay a graph."""
        if step.copies:
            source, target = (
                torch.tensor(side, device=self.device) for side in zip(*step.copies, strict=True)
            )
            for tensor in (tensor for cache in self.caches for tensor in cache.tensors):
                tensor[target] = tensor[source]
        graphable = not self.eager and not step.layout.inputs.brought
        if self.encoding is None:
            return graphable
        if not step.in_parts:
            assert self.line is not None
            self.line.finish(fused=self.forward.fused, by_module=self.eager)
            self.encoding.encode(step.jobs, fused=self.forward.fused, by_module=self.eager)
        return self.encoding.place(step.layout) and graphable

    def _decodes(self, layout: StepLayout, graphs: DecodeGraphs) -> bool:
        if self.encoding is not None and self.encoding.splices:  # a last token of a prompt may be an input's
            return False
        return layout.only_decodes and graphs.fits(layout.num_requests)

    def _way(self, draws: Sequence[RowSampling]) -> Sequence[RowSampling]:
        """Rows that say what the sampler may skip: on a GPU those of a graph, whose kernels are built.
        Kernels of a batch's own would be built in the middle of the others' streams.
        """
        if self.graphs is None:
            return draws
        return (*sampling_kind(draws), *(draw for draw in draws if draw.probed >= 0))

    def _eager_batch(self, step: ScheduledBatch, draws: Sequence[RowSampling]) -> ForwardBatch:
        buffer = self._eager_buffer()
        buffer.fill(step.layout, draws)
        buffer.upload(self.feed)
        batch = buffer.batch_of(step.layout, self.max_seq_len)
        spliced = None if self.encoding is None else self.encoding.spliced(step.layout)
        spliced = rows_of(step, spliced, self.device)
        return batch if spliced is None else replace(batch, spliced=spliced)

    def _eager_buffer(self) -> StepBuffer:
        """One buffer for all steps without a graph, made with the first."""
        if self._buffer is None:
            width = -(-self.max_seq_len // self.block_size)
            rows = max(self.most_tokens, self.forward.most_logits(self._requests))
            sizes = (self.most_tokens, self._requests, width, rows)
            heads, encoded = self.caches[0].num_kv_heads, self.forward.encoded_positions
            self._buffer = StepBuffer(*sizes, self.device, heads, encoded, self.block_size)
        return self._buffer
