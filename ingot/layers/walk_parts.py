"""What walks over a decoder's layers share: the layers, their gated MLPs, and the end of a decode step.

Owns the choice between the small kernels and the module's own head. Knows no product of a layer.

    return decode_logits(decoder, hidden, batch)
"""

from __future__ import annotations

import torch

from ingot.kernels.small_linear import small_linear
from ingot.kernels.small_product import MAX_ROWS
from ingot.layers.batch import ForwardBatch
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.mlp import GatedMLP
from ingot.quant.schemes import takes_small_products


def layers_of(decoder: Decoder) -> list[DecoderLayer]:
    """The decoder's layers."""
    return [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]


def mlp_of(layer: DecoderLayer) -> GatedMLP:
    """The MLP of a layer whose MLP is gated."""
    assert isinstance(layer.mlp, GatedMLP)
    return layer.mlp


def decode_logits(decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """Hidden states [T, hidden_size] after the final norm → logits [L, vocab_size]."""
    if len(batch.logits_indices) != len(hidden):  # else each row in its place: one token a request
        hidden = hidden[batch.logits_indices]
    head = decoder.lm_head
    if len(hidden) > MAX_ROWS or not takes_small_products(head.scheme):
        return decoder.logits(hidden)
    bias, tiles = head._parameters.get("bias"), head.small_tiles.at(len(hidden))
    return small_linear(hidden, head.stored(), bias, tiles=tiles)
