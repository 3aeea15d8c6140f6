"""A decoder's step for a few tokens, with the small kernels folded into the products.

Owns the order of launches, and which products are which kernels' up to how many tokens. One token: QKV with
norm, rotary and cache write (two kernels where the cache is in 8 bits); attention and its merge; output
product with the residual sum; gate and up with norm and SiLU; down product with the residual sum. More
tokens: the same without norms and sums in the products, which ``sum_norm`` computes after output and down
product, and so for one token where a weight has fewer bits; products that are left to the matrix library,
or with weights of fewer bits to ``packed_matmul``, have the separate kernels around them, which start early
where they can, and end in the order of columns that the product after them takes. The mathematics are those
of ``Decoder.forward`` and ``Decoder.logits``; the modules' own weights are used. Knows no request.

    small = small_products(hidden.shape[0], ways_of(decoder))
    if small is not None: logits = fused_logits(decoder, hidden, batch, caches, small)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.config.quant import HEAD
from ingot.kernels.operand_ends import rms_norm_operand, silu_mul_operand, sum_norm_operand
from ingot.kernels.operand_rows import OPERAND_SPAN, OperandOrder, OperandRows
from ingot.kernels.packed_matmul import DTYPES as PACKED_DTYPES
from ingot.kernels.packed_matmul import Rows, packed_matmul, packed_matmul_parts, takes_operand
from ingot.kernels.packed_tiles import PACKED_ROWS, packed_splits
from ingot.kernels.paged_attention import paged_attention
from ingot.kernels.product_tiles import FRAGMENT_ROWS
from ingot.kernels.rms_norm import rms_norm
from ingot.kernels.rope_kv_write import QkvParts
from ingot.kernels.small_gate_up import small_gate_up
from ingot.kernels.small_linear import small_linear, small_linear_parts
from ingot.kernels.small_product import MAX_ROWS
from ingot.kernels.small_qkv import small_qkv
from ingot.kernels.stored_weight import StoredWeight
from ingot.kernels.sum_norm import sum_norm
from ingot.layers.attention import Attention
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.early import early_tiles
from ingot.layers.folded import stream_ends
from ingot.layers.linear import Linear, all_small, linears
from ingot.layers.mlp import GatedMLP
from ingot.layers.walk_parts import layers_of, mlp_of
from ingot.quant.schemes import is_dense

ALL = frozenset({"qkv", "o", "gate_up", "down", "head"})
NONE = frozenset[str]()
# Up to how many rows (64 at most, unless it is none) which products are the small kernels'; the others are
# the matrix library's. Measured on an H200 in steps of a 7B model: benchmarks/decode_variants.py.
Ways = Sequence[tuple[int, frozenset[str]]]
WAYS: Ways = ((32, ALL), (64, ALL - {"qkv"}), (1 << 20, NONE))
# The same where weights have fewer bits; here the others are packed_matmul's, and more rows run module by
# module, with widened weights. Measured on an H200 in steps of a 7B model: benchmarks/narrow_variants.py. In
# fp32, which packed_matmul does not take, the next way of as many rows serves.
NARROW_WAYS: Ways = (
    (FRAGMENT_ROWS, ALL),
    (MAX_ROWS, frozenset({"head"})),
    (MAX_ROWS, ALL),
    (PACKED_ROWS, NONE),
)


def ways_of(decoder: Decoder) -> Ways:
    """The ways that a decoder's shape and weights can take."""
    if not all_small(decoder):
        return ()
    dense = all(linear.stored().bits == 16 for linear in linears(decoder).values())
    ways = WAYS if dense else NARROW_WAYS
    return tuple((most, small) for most, small in ways if fuses(decoder, small))


def small_products(rows: int, ways: Ways = WAYS) -> frozenset[str] | None:
    """Which products of a decode step of ``rows`` tokens the small kernels compute; None where ``ways`` names
    no way for so many.
    """
    return next((small for most, small in ways if rows <= most), None)


def fuses(decoder: Decoder, small: frozenset[str] = ALL) -> bool:
    """Whether the decoder's shape is one that the folded kernels compute: RMSNorm, gated MLP, weights as
    they are or in fewer bits; where another product than a small kernel's joins the stream, dense and without
    a bias; where another has fewer bits, in a dtype that ``packed_matmul`` takes.
    """
    config = decoder.config
    plain = not (config.qk_norm or config.mlp_bias)
    shape = all_small(decoder) and plain and config.norm == "rms_norm" and config.mlp == "silu_gated"
    if not shape or ALL - {"head"} <= small:
        return shape
    ends = [] if {"o", "down"} <= small else stream_ends(decoder)
    others = [linear for name, linear in linears(decoder).items() if name != HEAD]
    return not any(_adds_bias(linear) for linear in ends) and all(_leaves(linear) for linear in others)


def _adds_bias(linear: Linear) -> bool:
    """Whether the matrix library's product cannot join the stream before the norm after it."""
    return is_dense(linear.scheme) and linear.has_bias


def _leaves(linear: Linear) -> bool:
    """Whether a product can be left to the matrix library or to ``packed_matmul``."""
    scales = linear.stored().scales
    return scales is None or scales.dtype in PACKED_DTYPES


def fused_logits(
    decoder: Decoder,
    hidden: torch.Tensor,
    batch: ForwardBatch,
    caches: Sequence[LayerCache],
    small: frozenset[str] = ALL,
    dense: bool = True,
) -> torch.Tensor:
    """Logits [L, vocab_size] of a step in which every request decodes.

    Args:
        decoder: one that ``fuses`` with ``small``.
        hidden: [T, hidden_size] embedded tokens, contiguous, T at most 64 unless ``small`` is empty; written
            over.
        batch: with ``max_query_len`` 1.
        caches: keys and values of every layer, written to.
        small: the products that the small kernels compute.
        dense: whether all weights are; one token with all products in the small kernels then has kernels of
            its own.
    """
    norm: torch.Tensor | None = None
    if dense and hidden.shape[0] == 1 and small == ALL:
        hidden, norm = _one_row(decoder, hidden, batch, caches), decoder.norm.weight
    else:
        hidden = _rows(decoder, hidden, batch, caches, small)
    if len(batch.logits_indices) != len(hidden):  # else each row in its place: one token a request
        hidden = hidden[batch.logits_indices]
    if "head" not in small:
        return decoder.logits(hidden)
    return _product(decoder.lm_head, hidden, None, norm, decoder.config.norm_eps)


def _one_row(
    decoder: Decoder, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
) -> torch.Tensor:
    """The hidden state after the last layer, not normalised; norms and sums fold into the products."""
    eps = decoder.config.norm_eps
    for layer, cache in zip(layers_of(decoder), caches, strict=True):
        attended = _natural(_attend(decoder, layer, hidden, batch, cache, layer.input_layernorm.weight))
        hidden = _product(layer.self_attn.o_proj, attended, hidden)
        batch.see("stream", hidden)
        mlp = mlp_of(layer)
        inner = _gate_up(mlp, hidden, layer.post_attention_layernorm.weight, eps)
        hidden = _product(mlp.down_proj, inner, hidden)
        batch.see("stream", hidden)
    return hidden


def _rows(
    decoder: Decoder,
    hidden: torch.Tensor,
    batch: ForwardBatch,
    caches: Sequence[LayerCache],
    small: frozenset[str],
) -> torch.Tensor:
    """The hidden states after the last layer and the final norm; a norm also ends the product before it."""
    eps = decoder.config.norm_eps
    layers = layers_of(decoder)
    next_norms = [layer.input_layernorm.weight for layer in layers[1:]] + [decoder.norm.weight]
    starts = [_takes_operand("qkv", layer.self_attn.qkv_proj, hidden, small) for layer in layers] + [False]
    first = rms_norm_operand if starts[0] else rms_norm
    whole_heads = decoder.config.head_dim % OPERAND_SPAN == 0
    normed: Rows
    normed, _ = first(hidden, layers[0].input_layernorm.weight, eps, tiles=early_tiles(hidden))
    for layer, cache, next_norm, next_start in zip(layers, caches, next_norms, starts[1:], strict=True):
        heads = whole_heads and _takes_operand("o", layer.self_attn.o_proj, hidden, small)
        if "qkv" in small:
            attended = _attend(decoder, layer, _natural(normed), batch, cache, None, heads)
        else:
            attended = _attend_apart(decoder, layer, normed, batch, cache, heads)
        mlp, norm, output = mlp_of(layer), layer.post_attention_layernorm.weight, layer.self_attn.o_proj
        ordered = _takes_operand("gate_up", mlp.gate_up_proj, hidden, small)
        normed, hidden = _join(hidden, attended, output, norm, eps, "o" in small, ordered)
        batch.see("stream", hidden)
        inner = _inner(mlp, normed, eps, small)
        normed, hidden = _join(hidden, inner, mlp.down_proj, next_norm, eps, "down" in small, next_start)
        batch.see("stream", hidden)
    return _natural(normed)


def _takes_operand(name: str, linear: Linear, hidden: torch.Tensor, small: frozenset[str]) -> bool:
    """Whether the product takes its input in the operand's order."""
    weight, _ = _weights(linear)
    split = name in ("o", "down")
    return name not in small and takes_operand(len(hidden), weight, hidden.device, split)


def _natural(x: Rows) -> torch.Tensor:
    """Rows that were made in their own order."""
    assert isinstance(x, torch.Tensor)
    return x


def _inner(mlp: GatedMLP, x: Rows, eps: float, small: frozenset[str]) -> Rows:
    """silu(gate(x)) * up(x): [T, intermediate_size]."""
    if "gate_up" in small:
        return _gate_up(mlp, _natural(x), None, eps)
    gate_up = _apart(mlp.gate_up_proj, x)
    if _takes_operand("down", mlp.down_proj, gate_up, small):
        return silu_mul_operand(gate_up, mlp.tiles.at(len(gate_up), early_tiles(gate_up)))
    return mlp.bend(gate_up, early_tiles(gate_up))


def _join(
    hidden: torch.Tensor,
    x: Rows,
    linear: Linear,
    norm: torch.Tensor,
    eps: float,
    small: bool,
    ordered: bool,
) -> tuple[Rows, torch.Tensor]:
    """(norm of the stream, the stream) after a product's result has joined it; ``ordered``: the norm in the
    operand's order.
    """
    weight, bias = _weights(linear)
    if not small and weight.bits == 16:
        normed = rms_norm_operand if ordered else rms_norm
        return normed(hidden.addmm_(_natural(x), weight.values.t()), norm, eps, tiles=early_tiles(hidden))
    parts = small_linear_parts(_natural(x), weight) if small else packed_matmul_parts(x, weight)
    return (sum_norm_operand if ordered else sum_norm)(parts, hidden, norm, eps, bias)


def _apart(linear: Linear, x: Rows) -> torch.Tensor:
    """A product that is not the small kernels': [T, out_features]."""
    weight, bias = _weights(linear)
    return linear(_natural(x)) if weight.bits == 16 else packed_matmul(x, weight, bias)


def _attend(
    decoder: Decoder,
    layer: DecoderLayer,
    hidden: torch.Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
    norm: torch.Tensor | None,
    ordered: bool = False,
) -> Rows:
    """Attention of norm(hidden), before the output product: [T, num_heads * head_dim]; ``ordered``: in the
    operand's order.
    """
    config, attention = decoder.config, layer.self_attn
    if cache.scales is not None:  # a program of the one kernel holds less than a head, which a scale needs
        qkv = _product(attention.qkv_proj, hidden, None, norm, config.norm_eps)
        return _attended(attention, _placed(decoder, attention, qkv, batch, cache), batch, cache, ordered)
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
    batch.see("query", query)
    return _attended(attention, query, batch, cache, ordered)


def _attend_apart(
    decoder: Decoder,
    layer: DecoderLayer,
    hidden: Rows,
    batch: ForwardBatch,
    cache: LayerCache,
    ordered: bool,
) -> Rows:
    """``_attend`` of what is normalised, with a product by itself, in parts where that is faster."""
    attention = layer.self_attn
    weight, bias = _weights(attention.qkv_proj)
    rows, norm = len(batch.positions), layer.input_layernorm.weight
    qkv: torch.Tensor | QkvParts
    if weight.bits < 16 and packed_splits(rows, weight, norm.device, isinstance(hidden, OperandRows)) > 1:
        qkv = QkvParts(packed_matmul_parts(hidden, weight), bias, norm.dtype)
    else:
        qkv = _apart(attention.qkv_proj, hidden)
    return _attended(attention, _placed(decoder, attention, qkv, batch, cache), batch, cache, ordered)


def _placed(
    decoder: Decoder,
    attention: Attention,
    qkv: torch.Tensor | QkvParts,
    batch: ForwardBatch,
    cache: LayerCache,
) -> torch.Tensor:
    """Queries of a QKV product; its keys and values go into the cache."""
    rope = None if decoder.rotary is None else decoder.rotary.table
    return attention.place(qkv, batch, cache, rope, early_tiles(cache.keys))


def _attended(
    attention: Attention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache, ordered: bool
) -> Rows:
    """Queries [T, num_heads, head_dim] → [T, num_heads * head_dim]; ``ordered``: in the operand's order."""
    config = attention.config
    attended = paged_attention(
        query,
        cache.keys,
        cache.values,
        batch.block_tables,
        batch.seq_lens,
        config.attention_scale,
        batch.max_seq_len,
        window=config.sliding_window,
        tiles=attention.tiles_of(attention.decode_tiles, query.shape[0], cache),
        arrivals=batch.arrivals,
        out_scales=OperandOrder() if ordered else None,
        scales=cache.scales,
    ).flatten(1)
    return OperandRows(attended) if ordered else attended


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


def _weights(linear: Linear) -> tuple[StoredWeight, torch.Tensor | None]:
    """Weight and bias of a linear layer."""
    return linear.stored(), linear._parameters.get("bias")
