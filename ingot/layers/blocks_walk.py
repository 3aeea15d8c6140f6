"""A decoder's step where every linear layer of its layers multiplies numbers by blocks of columns (RPTQ).

Owns a walk over the layers in which norms, attention and SiLU end in numbers, norms in another order too, and
products end in residual sums. Heads that do not fill whole blocks become numbers in a pass of their own. The
mathematics are those of ``Decoder.forward``, with one rounding less a sum; the modules' own weights are used.
Knows no request.

    if walks_in_blocks(decoder): hidden = blocks_hidden(decoder, hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.kernels.int8_heads import int8_heads, takes_steps
from ingot.kernels.int8_linear import int8_linear
from ingot.kernels.int8_rows import Int8Rows
from ingot.kernels.norm_blocks import rms_norm_in_blocks
from ingot.kernels.rms_norm import rms_norm
from ingot.kernels.silu_mul_blocks import in_blocks, silu_mul_in_blocks
from ingot.layers.attention import Attention
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.linear import Linear, all_in_blocks
from ingot.layers.mlp import GatedMLP


def walks_in_blocks(decoder: Decoder) -> bool:
    """Whether the decoder's shape is one that the walk computes: RMSNorm, gated MLP, all of RPTQ."""
    config = decoder.config
    return config.norm == "rms_norm" and config.mlp == "silu_gated" and all_in_blocks(decoder)


def blocks_hidden(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """Hidden states after the final norm, [T, hidden_size].

    Args:
        decoder: one that ``walks_in_blocks``.
        hidden: [T, hidden_size] embedded tokens, contiguous; written over.
        batch: the step.
        caches: keys and values of every layer, written to.
    """
    eps = decoder.config.norm_eps
    rope = None if decoder.rotary is None else decoder.rotary.table
    for layer, cache in zip(decoder.layers, caches, strict=True):
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(mlp, GatedMLP)
        qkv = _normed_product(layer.input_layernorm.weight, eps, attention.qkv_proj, hidden)
        query = attention.place(qkv, batch, cache, rope)
        _add_product(hidden, _attended(attention, query, batch, cache), attention.o_proj)
        gate_up = _normed_product(layer.post_attention_layernorm.weight, eps, mlp.gate_up_proj, hidden)
        inner = silu_mul_in_blocks(gate_up, mlp.down_proj.in_blocks().steps)
        _add_product(hidden, inner, mlp.down_proj)
    normed, _ = rms_norm(hidden, decoder.norm.weight, eps)
    return normed


def _normed_product(norm: torch.Tensor, eps: float, linear: Linear, hidden: torch.Tensor) -> torch.Tensor:
    """norm(hidden) · Wᵀ + b."""
    parts = linear.in_blocks()
    x, _ = rms_norm_in_blocks(hidden, norm, eps, parts.steps)
    return int8_linear(x, parts.weight, hidden.dtype, parts.shift)


def _attended(attention: Attention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> Int8Rows:
    """Queries [T, num_heads, head_dim] → the output product's rows."""
    steps = attention.o_proj.in_blocks().steps
    if not takes_steps(steps, query.shape[1] * query.shape[2]):
        return in_blocks(attention.attend(query, batch, cache).flatten(1), steps)
    out = torch.empty(query.shape, dtype=torch.int8, device=query.device)
    return int8_heads(attention.attend(query, batch, cache, out, steps), steps)


def _add_product(hidden: torch.Tensor, x: Int8Rows, linear: Linear) -> None:
    """hidden += x · Wᵀ + b, rounded once."""
    parts = linear.in_blocks()
    int8_linear(x, parts.weight, hidden.dtype, parts.shift, hidden, hidden)
