"""A decoder's step where every linear layer of its layers multiplies in 8 bits (w8a8, w4a8).

Owns two walks over the layers in which no kernel only quantizes: norms, SiLU and attention end in 8 bits, and
products take them so. Steps of up to ``DECODE_ROWS`` tokens that all decode: split sums that end in residual
sum, norm and 8 bits; QKV of few rows with rotary and cache write; kernels start early where the GPU can.
Other steps: products of many rows, with the residual sums inside. The mathematics are those of
``Decoder.forward`` and ``Decoder.logits``, with one rounding less a sum; the modules' own weights are used.
Knows no request.

    if walks_int8(decoder): hidden = int8_hidden(decoder, hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.kernels.int8_heads import int8_heads
from ingot.kernels.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.int8_rows import Int8Rows
from ingot.kernels.norm_int8 import rms_norm_int8
from ingot.kernels.rms_norm import rms_norm
from ingot.kernels.silu_mul_int8 import silu_mul_int8
from ingot.kernels.small_int8_qkv import small_int8_qkv
from ingot.kernels.small_product import MAX_ROWS
from ingot.kernels.sum_norm import sum_norm, sum_norm_int8
from ingot.layers.attention import Attention
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder
from ingot.layers.early import early_tiles
from ingot.layers.linear import Linear, all_int8
from ingot.layers.mlp import GatedMLP
from ingot.layers.walk_parts import decode_logits, layers_of, mlp_of


def walks_int8(decoder: Decoder) -> bool:
    """Whether the decoder's shape is one that the walks compute: RMSNorm, gated MLP, all in 8 bits."""
    config = decoder.config
    return config.norm == "rms_norm" and config.mlp == "silu_gated" and all_int8(decoder)


def int8_logits(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """Logits [L, vocab_size] of a step in which every request decodes.

    Args:
        decoder: one that ``walks_int8``.
        hidden: [T, hidden_size] embedded tokens, T at most ``DECODE_ROWS`` (kernels/int8_tiles.py).
        batch: with ``max_query_len`` 1.
        caches: keys and values of every layer, written to.
    """
    layers, eps = layers_of(decoder), decoder.config.norm_eps
    x, _ = _first(decoder, hidden)
    for layer, cache, after in zip(layers, caches, [*layers[1:], None], strict=True):
        attention, mlp = layer.self_attn, mlp_of(layer)
        batch.see("attn_in", x)
        attended = _attended(attention, _placed(decoder, attention, x, hidden, batch, cache), batch, cache)
        parts = int8_linear_parts(attended, attention.o_proj.int8_weight(len(hidden)))
        norm, bias = layer.post_attention_layernorm.weight, _of(attention.o_proj, "bias")
        x, hidden = sum_norm_int8(parts, hidden, norm, eps, bias, _of(mlp.gate_up_proj, "input_scale"))
        batch.see("stream", hidden)
        parts = int8_linear_parts(_inner(mlp, x, hidden.dtype, batch), mlp.down_proj.int8_weight(len(hidden)))
        bias = _of(mlp.down_proj, "bias")
        if after is not None:
            static = _of(after.self_attn.qkv_proj, "input_scale")
            x, hidden = sum_norm_int8(parts, hidden, after.input_layernorm.weight, eps, bias, static)
            batch.see("stream", hidden)
        else:
            hidden, stream = sum_norm(parts, hidden, decoder.norm.weight, eps, bias)
            batch.see("stream", stream)
    return decode_logits(decoder, hidden, batch)


def int8_hidden(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """Hidden states after the final norm, [T, hidden_size].

    Args:
        decoder: one that ``walks_int8``.
        hidden: [T, hidden_size] embedded tokens, contiguous; written over.
        batch: the step.
        caches: keys and values of every layer, written to.
    """
    layers, eps = layers_of(decoder), decoder.config.norm_eps
    rope = None if decoder.rotary is None else decoder.rotary.table
    x, _ = _first(decoder, hidden)
    for layer, cache, after in zip(layers, caches, [*layers[1:], None], strict=True):
        attention, mlp = layer.self_attn, mlp_of(layer)
        batch.see("attn_in", x)
        query = attention.place(_product(attention.qkv_proj, x, hidden.dtype), batch, cache, rope)
        _add_product(hidden, _attended(attention, query, batch, cache), attention.o_proj)
        batch.see("stream", hidden)
        static = _of(mlp.gate_up_proj, "input_scale")
        x, _ = rms_norm_int8(hidden, layer.post_attention_layernorm.weight, eps, static=static)
        _add_product(hidden, _inner(mlp, x, hidden.dtype, batch), mlp.down_proj)
        batch.see("stream", hidden)
        if after is not None:
            static = _of(after.self_attn.qkv_proj, "input_scale")
            x, _ = rms_norm_int8(hidden, after.input_layernorm.weight, eps, static=static)
    normed, _ = rms_norm(hidden, decoder.norm.weight, eps)
    return normed


def _of(linear: Linear, name: str) -> torch.Tensor | None:
    """A tensor that a linear layer has or has not: its bias, its static scale of activations."""
    return linear._parameters.get(name)


def _first(decoder: Decoder, hidden: torch.Tensor) -> tuple[Int8Rows, torch.Tensor]:
    """The first layer's normalised input."""
    layer = layers_of(decoder)[0]
    static = _of(layer.self_attn.qkv_proj, "input_scale")
    return rms_norm_int8(hidden, layer.input_layernorm.weight, decoder.config.norm_eps, static=static)


def _product(linear: Linear, x: Int8Rows, dtype: torch.dtype) -> torch.Tensor:
    """x · Wᵀ + b."""
    return int8_linear(x, linear.int8_weight(len(x.values)), dtype, _of(linear, "bias"))


def _add_product(hidden: torch.Tensor, x: Int8Rows, linear: Linear) -> None:
    """hidden += x · Wᵀ + b, rounded once."""
    int8_linear(x, linear.int8_weight(len(x.values)), hidden.dtype, _of(linear, "bias"), hidden, hidden)


def _placed(
    decoder: Decoder,
    attention: Attention,
    x: Int8Rows,
    hidden: torch.Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
) -> torch.Tensor:
    """Queries [T, num_heads, head_dim]; keys and values go into the cache, of few rows by the product itself
    where it has the numbers' dtype and heads have no norms.
    """
    config = decoder.config
    rope = None if decoder.rotary is None else decoder.rotary.table
    if len(hidden) > MAX_ROWS or config.qk_norm or cache.keys.dtype != hidden.dtype:
        qkv = _product(attention.qkv_proj, x, hidden.dtype)
        return attention.place(qkv, batch, cache, rope, early_tiles(qkv))
    query = small_int8_qkv(
        x,
        attention.qkv_proj.int8_weight(len(hidden)),
        _of(attention.qkv_proj, "bias"),
        rope,
        batch.rope_rows,
        batch.positions,
        batch.slot_mapping,
        cache.keys,
        cache.values,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        logn_length=config.logn_length,
    )
    batch.see("query", query)
    return query


def _attended(attention: Attention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> Int8Rows:
    """Queries [T, num_heads, head_dim] → the output product's rows."""
    out = torch.empty(query.shape, dtype=torch.int8, device=query.device)
    scales = _of(attention.o_proj, "input_scale")
    if scales is None:
        scales = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    attention.attend(query, batch, cache, out, scales)
    rows = int8_heads(out, scales)
    batch.see("attended", rows)
    return rows


def _inner(mlp: GatedMLP, x: Int8Rows, dtype: torch.dtype, batch: ForwardBatch) -> Int8Rows:
    """silu(gate) * up: the down product's rows."""
    inner = silu_mul_int8(_product(mlp.gate_up_proj, x, dtype), _of(mlp.down_proj, "input_scale"))
    batch.see("mlp_in", x)
    batch.see("inner", inner)
    return inner
