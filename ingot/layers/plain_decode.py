"""A step of a few tokens for decoders with plain MLPs (GPT-2): bias and residual sum inside every product.

Owns the order of launches a layer: norm, QKV product, cache write, attention; output product with the
residual sum; norm, up product, activation; down product with the residual sum. The mathematics are those of
``Decoder.forward`` and ``Decoder.logits``; the modules' own weights are used. Knows no request.

    if is_plain(decoder): logits = plain_logits(decoder, hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.kernels.small_linear import small_linear
from ingot.kernels.small_product import MAX_ROWS
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.linear import Linear, all_dense, all_small
from ingot.layers.mlp import MLP

PLAIN_ROWS = 8  # above, the matrix library's products were as fast on an H200


def is_plain(decoder: Decoder) -> bool:
    """Whether the decoder's MLPs are plain and its weights ones that the small kernels read."""
    return all_small(decoder) and decoder.config.mlp != "silu_gated"


def plain_rows(decoder: Decoder) -> int:
    """Up to how many rows these kernels are used: all they take where some weight has fewer bits."""
    return PLAIN_ROWS if all_dense(decoder) else MAX_ROWS


def plain_logits(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """Logits [L, vocab_size] of a step in which every request decodes.

    Args:
        decoder: one that ``is_plain``.
        hidden: [T, hidden_size] embedded tokens, T at most ``small_product.MAX_ROWS``.
        batch: with ``max_query_len`` 1.
        caches: keys and values of every layer, written to.
    """
    rope = None if decoder.rotary is None else decoder.rotary.table
    for layer, cache in zip(decoder.layers, caches, strict=True):
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(mlp, MLP)
        normed, _ = layer.input_layernorm(hidden)
        query = attention.place(_product(attention.qkv_proj, normed), batch, cache, rope)
        attended = attention.attend(query, batch, cache).flatten(1)
        hidden = _product(attention.o_proj, attended, hidden)
        batch.see("stream", hidden)
        normed, _ = layer.post_attention_layernorm(hidden)
        hidden = _product(mlp.down_proj, mlp.bend(_product(mlp.up_proj, normed)), hidden)
        batch.see("stream", hidden)
    normed, _ = decoder.norm(hidden)
    return _product(decoder.lm_head, normed[batch.logits_indices])


def _product(linear: Linear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x · Wᵀ + b + residual."""
    return small_linear(x, linear.stored(), linear._parameters.get("bias"), residual)
