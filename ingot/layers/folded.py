"""A decoder's step with the residual sums inside the matrix library's products, for any number of tokens.

Owns one walk over the layers: the output and down products add into the stream of hidden states in place, so
that a norm reads one tensor and writes one. The mathematics are those of ``Decoder.forward``, with one
rounding less a sum; the modules' own weights and kernels are used. Knows no request.

    if folds(decoder): hidden = folded_hidden(decoder, hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.linear import Linear
from ingot.quant.schemes import is_dense


def folds(decoder: Decoder) -> bool:
    """Whether every output and down product is dense and has no bias."""
    return all(is_dense(linear.scheme) and not linear.has_bias for linear in stream_ends(decoder))


def stream_ends(decoder: Decoder) -> list[Linear]:
    """The products whose results join the stream of hidden states."""
    return [linear for layer in decoder.layers for linear in _ends(layer)]


def folded_hidden(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """Hidden states after the final norm, [T, hidden_size].

    Args:
        decoder: one that ``folds``.
        hidden: [T, hidden_size] embedded tokens, contiguous; written over.
        batch: the step.
        caches: keys and values of every layer, written to.
    """
    rope = None if decoder.rotary is None else decoder.rotary.table
    for layer, cache in zip(decoder.layers, caches, strict=True):
        assert isinstance(layer, DecoderLayer)
        output, down = _ends(layer)
        normed, _ = layer.input_layernorm(hidden)
        attention = layer.self_attn
        query = attention.place(attention.qkv_proj(normed), batch, cache, rope)
        _add_product(hidden, attention.attend(query, batch, cache).flatten(1), output)
        batch.see("stream", hidden)
        normed, _ = layer.post_attention_layernorm(hidden)
        _add_product(hidden, layer.mlp.activate(normed), down)
        batch.see("stream", hidden)
    normed, _ = decoder.norm(hidden)
    return normed


def _ends(layer: torch.nn.Module) -> tuple[Linear, Linear]:
    """The two products whose results join the stream."""
    assert isinstance(layer, DecoderLayer)
    return layer.self_attn.o_proj, layer.mlp.down_proj


def _add_product(hidden: torch.Tensor, x: torch.Tensor, linear: Linear) -> None:
    """hidden += x · Wᵀ, summed in fp32 and rounded once."""
    weight = linear.weight
    assert isinstance(weight, torch.Tensor)
    hidden.addmm_(x, weight.t())
