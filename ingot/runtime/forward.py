"""A step's tensors in, logits out.

Owns the choice between a decoder's ways of computing the same: module by module, or, on a GPU, with residual
sums inside the matrix library's products, or, for a few decoding tokens, with all small kernels folded into
the products; and, where all layers multiply in 8 bits, or numbers by blocks, with kernels that end and begin
so. Knows no request.

    logits = Forward(model, caches, fused=True)(batch)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ingot.kernels.int8_tiles import DECODE_ROWS
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.blocks_walk import blocks_hidden, blocks_logits, walks_in_blocks
from ingot.layers.decoder import Decoder
from ingot.layers.folded import folded_hidden, folds
from ingot.layers.fused_decode import fused_logits, small_products, ways_of
from ingot.layers.int8_walk import int8_hidden, int8_logits, walks_int8
from ingot.layers.linear import all_dense
from ingot.layers.plain_decode import is_plain, plain_logits, plain_rows
from ingot.layers.step_record import StepRecord


class Forward:
    """Computes steps of one model over one cache.

    ``fused`` asks for the folded kernels in steps of tokens that all decode, for the products and up to the
    numbers of tokens that ``ways`` (fused_decode.py) names, and for products that add in place in the others.
    A decoder whose shape they do not know runs module by module. ``by_module`` forces that, so that hooks on
    modules fire.

    Attributes:
        observer: gets a record of every step that runs from now on, on the CPU; set it before the first one,
            since graphs hold what they were captured with.
        record: what the last call kept; a captured graph's own is written again at every replay.
    """

    def __init__(self, model: Decoder, caches: Sequence[LayerCache], *, fused: bool) -> None:
        self.model = model
        self.caches = caches
        self.dense = all_dense(model)
        self.ways = ways_of(model)
        self.fused = fused
        self.plain = fused and is_plain(model)
        self.plain_rows = plain_rows(model)
        self.folded = fused and folds(model)
        self.int8 = walks_int8(model)
        self.blocks = walks_in_blocks(model)
        self.by_module = False
        self.observer: Callable[[StepRecord], None] | None = None
        self.record: StepRecord | None = None

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, vocab_size] of the batch's wanted tokens, in the model's dtype."""
        if self.observer is None:
            return self._logits(batch)
        record = StepRecord()
        logits = self._logits(replace(batch, record=record))
        told = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        record.close(told, [cache.tensors for cache in self.caches], logits)
        self.record = record
        return logits

    def observed(self, record: StepRecord | None) -> None:
        """A step has run, and this is its record."""
        if self.observer is not None and record is not None:
            self.observer(record.on_host())

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        model = self.model
        hidden = model.embed(batch.input_ids, batch.positions)  # [T, hidden_size]
        batch.see("stream", hidden)
        decodes = batch.max_query_len == 1 and not self.by_module
        small = small_products(hidden.shape[0], self.ways)
        if self.fused and self.int8 and not self.by_module:
            if decodes and hidden.shape[0] <= DECODE_ROWS:
                return int8_logits(model, hidden, batch, self.caches)
            hidden = int8_hidden(model, hidden, batch, self.caches)
            return model.logits(hidden[batch.logits_indices])
        if self.fused and self.blocks and not self.by_module:
            if decodes and hidden.shape[0] <= DECODE_ROWS:
                return blocks_logits(model, hidden, batch, self.caches)
            hidden = blocks_hidden(model, hidden, batch, self.caches)
            return model.logits(hidden[batch.logits_indices])
        if self.fused and decodes and small is not None:
            return fused_logits(model, hidden, batch, self.caches, small, self.dense)
        if self.plain and decodes and hidden.shape[0] <= self.plain_rows:
            return plain_logits(model, hidden, batch, self.caches)
        if self.folded and not self.by_module:
            hidden = folded_hidden(model, hidden, batch, self.caches)
        else:
            hidden = model(hidden, batch, self.caches)
        return model.logits(hidden[batch.logits_indices])
