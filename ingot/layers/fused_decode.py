"""A decoder's step for a few tokens, with the small kernels folded into the products.

Owns the order of launches. One token: QKV with norm, rotary and cache write; attention and its merge;
output product with the residual sum; gate and up with norm and SiLU; down product with the residual sum. More
tokens: the same without norms and sums in the products, which ``sum_norm`` computes after output and down
product. The mathematics are those of ``Decoder.forward`` and ``Decoder.logits``; the modules' own weights are
used. Knows no request.

    if fuses(decoder): logits = fused_logits(decoder, hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.kernels.overlap import overlaps
from ingot.kernels.paged_attention import paged_attention
from ingot.kernels.rms_norm import rms_norm
from ingot.kernels.small_gate_up import small_gate_up
from ingot.kernels.small_linear import small_linear, small_linear_parts
from ingot.kernels.small_qkv import small_qkv
from ingot.kernels.sum_norm import sum_norm
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
    norm: torch.Tensor | None = None
    if hidden.shape[0] == 1:
        hidden, norm = _one_row(decoder, hidden, batch, caches), decoder.norm.weight
    else:
        hidden = _rows(decoder, hidden, batch, caches)
    if len(batch.logits_indices) != len(hidden):  # else each row in its place: one token a request
        hidden = hidden[batch.logits_indices]
    return _product(decoder.lm_head, hidden, None, norm, decoder.config.norm_eps)


def _one_row(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """The hidden state after the last layer, not normalised; norms and sums fold into the products."""
    eps = decoder.config.norm_eps
    for layer, cache in zip(decoder.layers, caches, strict=True):
        assert isinstance(layer, DecoderLayer)
        attended = _attend(decoder, layer, hidden, batch, cache, layer.input_layernorm.weight)
        hidden = _product(layer.self_attn.o_proj, attended, hidden)
        mlp = _mlp(layer)
        inner = _gate_up(mlp, hidden, layer.post_attention_layernorm.weight, eps)
        hidden = _product(mlp.down_proj, inner, hidden)
    return hidden


def _rows(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """The hidden states after the last layer and the final norm; a norm also ends the product before it."""
    eps = decoder.config.norm_eps
    layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    next_norms = [layer.input_layernorm.weight for layer in layers[1:]] + [decoder.norm.weight]
    tiles = {"OVERLAP": 2} if overlaps(hidden.device) else None
    normed, _ = rms_norm(hidden, layers[0].input_layernorm.weight, eps, tiles=tiles)
    for layer, cache, next_norm in zip(layers, caches, next_norms, strict=True):
        attended = _attend(decoder, layer, normed, batch, cache, None)
        weight, bias = _weights(layer.self_attn.o_proj)
        parts = small_linear_parts(attended, weight)
        normed, hidden = sum_norm(parts, hidden, layer.post_attention_layernorm.weight, eps, bias)
        mlp = _mlp(layer)
        parts = small_linear_parts(_gate_up(mlp, normed, None, eps), _weights(mlp.down_proj)[0])
        normed, hidden = sum_norm(parts, hidden, next_norm, eps)
    return normed


def _attend(
    decoder: Decoder,
    layer: DecoderLayer,
    hidden: torch.Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
    norm: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of norm(hidden), before the output product: [T, num_heads * head_dim]."""
    config, attention = decoder.config, layer.self_attn
    weight, bias = _weights(attention.qkv_proj)
    query = small_qkv(
        hidden,
        weight,
        bias,
        norm,
        config.norm_eps,
        None if decoder.rotary is None else decoder.rotary.table,
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
    return attended.flatten(1)


def _mlp(layer: DecoderLayer) -> GatedMLP:
    assert isinstance(layer.mlp, GatedMLP)
    return layer.mlp


def _gate_up(mlp: GatedMLP, x: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    """silu(gate(norm(x))) * up(norm(x)): [T, intermediate_size]."""
    weight, _ = _weights(mlp.gate_up_proj)
    return small_gate_up(x, weight, norm, eps, tiles=mlp.small_tiles.at(x.shape[0]))


def _product(
    linear: Linear,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """linear(norm(x)) + residual."""
    weight, bias = _weights(linear)
    return small_linear(x, weight, bias, residual, norm, eps, linear.small_tiles.at(x.shape[0]))


def _weights(linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a dense linear layer."""
    weight = linear._parameters["weight"]
    assert weight is not None
    return weight, linear._parameters.get("bias")
