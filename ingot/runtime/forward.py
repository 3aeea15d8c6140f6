"""A step's tensors in, logits out.

Owns the choice between a decoder's ways of computing the same: module by module, or, on a GPU, with residual
sums inside the matrix library's products, or, for a few decoding tokens, with all small kernels folded into
the products. Knows no request.

    logits = Forward(model, caches, fused=True)(batch)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder
from ingot.layers.folded import folded_hidden, folds
from ingot.layers.fused_decode import FUSED_ROWS, fused_logits, fuses
from ingot.layers.plain_decode import is_plain, plain_logits


class Forward:
    """Computes steps of one model over one cache.

    ``fused`` asks for the folded kernels in steps of up to ``FUSED_ROWS`` tokens that all decode, and for
    products that add in place in the others. A decoder whose shape they do not know runs module by module.
    ``by_module`` forces that, so that hooks on modules fire.
    """

    def __init__(self, model: Decoder, caches: Sequence[LayerCache], *, fused: bool) -> None:
        self.model = model
        self.caches = caches
        self.fused = fused and fuses(model)
        self.plain = fused and is_plain(model)
        self.folded = fused and folds(model)
        self.by_module = False

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, vocab_size] of the batch's wanted tokens, in the model's dtype."""
        model = self.model
        hidden = model.embed(batch.input_ids, batch.positions)  # [T, hidden_size]
        few = batch.max_query_len == 1 and hidden.shape[0] <= FUSED_ROWS
        if self.fused and few and not self.by_module:
            return fused_logits(model, hidden, batch, self.caches)
        if self.plain and few and not self.by_module:
            return plain_logits(model, hidden, batch, self.caches)
        if self.folded and not self.by_module:
            hidden = folded_hidden(model, hidden, batch, self.caches)
        else:
            hidden = model(hidden, batch, self.caches)
        return model.logits(hidden[batch.logits_indices])
