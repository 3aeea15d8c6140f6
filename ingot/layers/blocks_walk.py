"""A decoder's step where every linear layer of its layers multiplies numbers by blocks of columns (RPTQ).

Owns two walks over the layers in which norms, attention and SiLU end in numbers, norms in another order too.
Steps of up to ``DECODE_ROWS`` tokens that all decode: split sums that end in residual sum, norm and numbers;
kernels start early where the GPU can. Other steps: products with the residual sums inside. Heads that do not
fill whole blocks become numbers in a pass of their own. The mathematics are those of ``Decoder.forward`` and
``Decoder.logits``, with one rounding less a sum; the modules' own weights are used. Knows no request.

    if walks_in_blocks(decoder): hidden = blocks_hidden(decoder, hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.kernels.int8_heads import int8_heads, takes_steps
from ingot.kernels.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.int8_rows import Int8Rows
from ingot.kernels.norm_blocks import rms_norm_in_blocks
from ingot.kernels.rms_norm import rms_norm
from ingot.kernels.silu_mul_blocks import in_blocks, silu_mul_in_blocks
from ingot.kernels.sum_norm import sum_norm
from ingot.kernels.sum_norm_blocks import sum_norm_in_blocks
from ingot.layers.attention import Attention
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder
from ingot.layers.early import early_tiles
from ingot.layers.linear import Linear, all_in_blocks
from ingot.layers.mlp import GatedMLP
from ingot.layers.walk_parts import decode_logits, layers_of, mlp_of


def walks_in_blocks(decoder: Decoder) -> bool:
    """Whether the decoder's shape is one that the walks compute: RMSNorm, gated MLP, all of RPTQ."""
    config = decoder.config
    return config.norm == "rms_norm" and config.mlp == "silu_gated" and all_in_blocks(decoder)


def blocks_logits(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """Logits [L, vocab_size] of a step in which every request decodes.

    Args:
        decoder: one that ``walks_in_blocks``.
        hidden: [T, hidden_size] embedded tokens, T at most ``DECODE_ROWS`` (kernels/int8_tiles.py).
        batch: with ``max_query_len`` 1.
        caches: keys and values of every layer, written to.
    """
    layers, eps, dtype = layers_of(decoder), decoder.config.norm_eps, hidden.dtype
    rope = None if decoder.rotary is None else decoder.rotary.table
    first = layers[0]
    x = _normed(first.input_layernorm.weight, eps, first.self_attn.qkv_proj, hidden)
    for layer, cache, after in zip(layers, caches, [*layers[1:], None], strict=True):
        attention, mlp = layer.self_attn, mlp_of(layer)
        batch.see("attn_in", x)
        qkv = _product(attention.qkv_proj, x, dtype)
        query = attention.place(qkv, batch, cache, rope, early_tiles(qkv))
        attended, norm = _attended(attention, query, batch, cache), layer.post_attention_layernorm.weight
        x, hidden = _join(hidden, attended, attention.o_proj, norm, eps, mlp.gate_up_proj)
        batch.see("stream", hidden)
        inner = _inner(mlp, x, dtype, batch)
        if after is not None:
            norm, start = after.input_layernorm.weight, after.self_attn.qkv_proj
            x, hidden = _join(hidden, inner, mlp.down_proj, norm, eps, start)
            batch.see("stream", hidden)
        else:
            down = mlp.down_proj.in_blocks()
            parts = int8_linear_parts(inner, down.weight)
            hidden, stream = sum_norm(parts, hidden, decoder.norm.weight, eps, down.shift)
            batch.see("stream", stream)
    return decode_logits(decoder, hidden, batch)


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
    for layer, cache in zip(layers_of(decoder), caches, strict=True):
        attention, mlp = layer.self_attn, mlp_of(layer)
        x = _normed(layer.input_layernorm.weight, eps, attention.qkv_proj, hidden)
        batch.see("attn_in", x)
        query = attention.place(_product(attention.qkv_proj, x, hidden.dtype), batch, cache, rope)
        _add_product(hidden, _attended(attention, query, batch, cache), attention.o_proj)
        batch.see("stream", hidden)
        x = _normed(layer.post_attention_layernorm.weight, eps, mlp.gate_up_proj, hidden)
        _add_product(hidden, _inner(mlp, x, hidden.dtype, batch), mlp.down_proj)
        batch.see("stream", hidden)
    normed, _ = rms_norm(hidden, decoder.norm.weight, eps)
    return normed


def _normed(norm: torch.Tensor, eps: float, after: Linear, hidden: torch.Tensor) -> Int8Rows:
    """norm(hidden): the rows of the product after it."""
    x, _ = rms_norm_in_blocks(hidden, norm, eps, after.in_blocks().steps)
    return x


def _product(linear: Linear, x: Int8Rows, dtype: torch.dtype) -> torch.Tensor:
    """x · Wᵀ + b."""
    parts = linear.in_blocks()
    return int8_linear(x, parts.weight, dtype, parts.shift)


def _join(
    hidden: torch.Tensor, x: Int8Rows, linear: Linear, norm: torch.Tensor, eps: float, after: Linear
) -> tuple[Int8Rows, torch.Tensor]:
    """s = hidden + x · Wᵀ + b, rounded once: (norm(s), the rows of the product ``after`` it; s)."""
    own = linear.in_blocks()
    parts = int8_linear_parts(x, own.weight)
    return sum_norm_in_blocks(parts, hidden, norm, eps, after.in_blocks().steps, own.shift)


def _inner(mlp: GatedMLP, x: Int8Rows, dtype: torch.dtype, batch: ForwardBatch) -> Int8Rows:
    """silu(gate) * up: the down product's rows."""
    inner = silu_mul_in_blocks(_product(mlp.gate_up_proj, x, dtype), mlp.down_proj.in_blocks().steps)
    batch.see("mlp_in", x)
    batch.see("inner", inner)
    return inner


def _attended(attention: Attention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> Int8Rows:
    """Queries [T, num_heads, head_dim] → the output product's rows."""
    steps = attention.o_proj.in_blocks().steps
    if takes_steps(steps, query.shape[1] * query.shape[2]):
        out = torch.empty(query.shape, dtype=torch.int8, device=query.device)
        rows = int8_heads(attention.attend(query, batch, cache, out, steps), steps)
    else:
        rows = in_blocks(attention.attend(query, batch, cache).flatten(1), steps)
    batch.see("attended", rows)
    return rows


def _add_product(hidden: torch.Tensor, x: Int8Rows, linear: Linear) -> None:
    """hidden += x · Wᵀ + b, rounded once."""
    parts = linear.in_blocks()
    int8_linear(x, parts.weight, hidden.dtype, parts.shift, hidden, hidden)
