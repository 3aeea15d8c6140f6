"""A decoder's step for a few tokens, with the small kernels folded into the products.

Owns the order of six launches a layer: QKV with norm, rotary and cache write; attention and its merge; output
product with the residual sum; gate and up with norm and SiLU; down product with the residual sum. The
mathematics are those of ``Decoder.forward`` and ``Decoder.logits``; the modules' own weights are used. Knows
no request.

    if fuses(decoder): logits = fused_logits(decoder, hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.kernels.paged_attention import paged_attention
from ingot.kernels.small_gate_up import small_gate_up
from ingot.kernels.small_linear import small_linear
from ingot.kernels.small_qkv import small_qkv
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.linear import Linear
from ingot.layers.mlp import GatedMLP
from ingot.quant.schemes import Dense

FUSED_ROWS = 8  # above, the matrix library's products were as fast on an H200


def fuses(decoder: Decoder) -> bool:
    """Whether the decoder's shape is one that the folded kernels compute: RMSNorm, gated MLP, dense
    weights.
    """
    config = decoder.config
    dense = all(isinstance(m.scheme, Dense) for m in decoder.modules() if isinstance(m, Linear))
    plain = not (config.qk_norm or config.mlp_bias)
    return dense and plain and config.norm == "rms_norm" and config.mlp == "silu_gated"


def fused_logits(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """Logits [L, vocab_size] of a step in which every request decodes.

    Args:
        hidden: [T, hidden_size] embedded tokens, T at most ``FUSED_ROWS``.
        batch: with ``max_query_len`` 1.
        caches: keys and values of every layer, written to.
    """
    rope = None if decoder.rotary is None else decoder.rotary.table
    for layer, cache in zip(decoder.layers, caches, strict=True):
        assert isinstance(layer, DecoderLayer)
        hidden = _attend(decoder, layer, hidden, batch, cache, rope)
        hidden = _feed_forward(decoder, layer, hidden)
    rows = hidden[batch.logits_indices]
    norm = (decoder.norm.weight, decoder.config.norm_eps)
    return _product(decoder.lm_head, rows, None, *norm)


def _attend(
    decoder: Decoder,
    layer: DecoderLayer,
    hidden: torch.Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
    rope: torch.Tensor | None,
) -> torch.Tensor:
    """hidden + attention(norm(hidden))."""
    config, attention = decoder.config, layer.self_attn
    weight, bias = _weights(attention.qkv_proj)
    query = small_qkv(
        hidden,
        weight,
        bias,
        layer.input_layernorm.weight,
        config.norm_eps,
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
        tiles=attention.small_tiles.at(hidden.shape[0]),
    )
    attended = paged_attention(
        query,
        cache.keys,
        cache.values,
        batch.block_tables,
        batch.seq_lens,
        config.attention_scale,
        batch.max_seq_len,
        window=config.sliding_window,
        tiles=attention.decode_tiles.at(query.shape[0]),
        arrivals=batch.arrivals,
    )
    return _product(attention.o_proj, attended.flatten(1), hidden)


def _feed_forward(decoder: Decoder, layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
    """hidden + mlp(norm(hidden))."""
    mlp = layer.mlp
    assert isinstance(mlp, GatedMLP)
    gate_up, _ = _weights(mlp.gate_up_proj)
    norm = (layer.post_attention_layernorm.weight, decoder.config.norm_eps)
    inner = small_gate_up(hidden, gate_up, *norm, tiles=mlp.small_tiles.at(hidden.shape[0]))
    return _product(mlp.down_proj, inner, hidden)


def _product(
    linear: Linear,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> torch.Tensor:
    """linear(norm(x)) + residual."""
    weight, bias = _weights(linear)
    tiles = linear.small_tiles.at(x.shape[0])
    return small_linear(x, weight, bias, residual, norm_weight, norm_eps, tiles)


def _weights(linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a dense linear layer."""
    weight = linear._parameters["weight"]
    assert weight is not None
    return weight, linear._parameters.get("bias")
