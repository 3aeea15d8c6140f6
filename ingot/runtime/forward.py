"""A step's tensors in, logits out.

Owns the choice between a decoder's two ways of computing the same: module by module, or, for a few decoding
tokens on a GPU, with the small kernels folded into the products. Knows no request.

    logits = Forward(model, caches, fused=True)(batch)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder
from ingot.layers.fused_decode import FUSED_ROWS, fused_logits, fuses


class Forward:
    """Computes steps of one model over one cache.

    ``fused`` asks for the folded kernels in steps of up to ``FUSED_ROWS`` tokens that all decode; a decoder
    whose shape they do not know runs module by module. ``by_module`` forces that, so that hooks on modules
    fire.
    """

    def __init__(self, model: Decoder, caches: Sequence[LayerCache], *, fused: bool) -> None:
        self.model = model
        self.caches = caches
        self.fused = fused and fuses(model)
        self.by_module = False

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, vocab_size] of the batch's wanted tokens, in the model's dtype."""
        model = self.model
        hidden = model.embed(batch.input_ids, batch.positions)  # [T, hidden_size]
        few = batch.max_query_len == 1 and hidden.shape[0] <= FUSED_ROWS
        if self.fused and few and not self.by_module:
            return fused_logits(model, hidden, batch, self.caches)
        hidden = model(hidden, batch, self.caches)
        return model.logits(hidden[batch.logits_indices])
