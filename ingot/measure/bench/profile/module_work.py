"""The least bytes and operations of a module's call, from its arguments: what every kernel for it must do.

A product reads its weight and rows once and writes its result; attention reads the keys and values that its
queries see. Functions take the arguments of the method that they describe, and may read lengths off a GPU.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.layers.attention import Attention
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.decoder import Decoder
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.linear import Linear, held_bytes
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import Norm
from ingot.layers.products.layer_products import Product
from ingot.layers.products.row_forms import BlockForm, Form, Int8Form, Rows
from ingot.measure.bench.profile.step_figures import LeastWork
from ingot.measure.side.step_work import causal_pairs


def of_product(product: Product, x: Rows, *_: Any, **__: Any) -> LeastWork:
    return of_linear(product.linear, x)


def of_linear(linear: Linear, x: Rows) -> LeastWork:
    """2 operations per element of the weight and row."""
    values = x.values if isinstance(x, (Int8Rows, OperandRows)) else x
    rows = values.numel() // linear.in_features
    itemsize = 2 if values.itemsize == 1 else values.itemsize
    weight = held_bytes(linear)
    moved = weight + values.nbytes + rows * linear.out_features * itemsize
    return LeastWork(moved, 2.0 * rows * linear.in_features * linear.out_features)


def of_norm(norm: Norm, x: torch.Tensor, residual: torch.Tensor | None, *_: Any, **__: Any) -> LeastWork:
    """With a residual both are read, and the sum and its norm written."""
    return LeastWork(x.nbytes * (2 if residual is None else 4))


def of_summed_norm(norm: Norm, parts: Any, residual: torch.Tensor, *_: Any, **__: Any) -> LeastWork:
    return LeastWork(4 * residual.nbytes)


def of_post_norm(
    form: Any, norm: Norm, x: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
) -> LeastWork:
    return LeastWork(4 * residual.nbytes)


def of_rope(
    attention: Attention, qkv: Any, batch: ForwardBatch, cache: LayerCache, *_: Any, **__: Any
) -> LeastWork:
    """Queries, keys and values are read and written."""
    heads = attention.heads
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return LeastWork(2 * len(batch.positions) * width * cache.keys.itemsize)


def of_attention(
    attention: Attention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache, *_: Any
) -> LeastWork:
    """4 operations per query, key that it sees, and channel of a query head."""
    lens, starts = batch.seq_lens.tolist(), batch.query_start.tolist()
    window, seen, pairs = attention.scoring.window, 0, 0
    for length, (start, end) in zip(lens, pairwise(starts), strict=True):
        count = end - start
        seen += min(length, window + count - 1) if window else length
        pairs += causal_pairs(length, window) - causal_pairs(length - count, window)
    return _attended(query, seen * _token_bytes(cache), pairs)


def of_cross_attention(
    attention: CrossAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache, *_: Any
) -> LeastWork:
    """Every token sees all of its request's encoded positions, which are read once."""
    assert batch.encoded is not None
    assert cache.encoded is not None
    lens = batch.encoded.lens.tolist()
    firsts = batch.query_start.tolist()[:-1] if batch.max_query_len > 1 else range(len(batch.seq_lens))
    seen = sum(lens[first] for first in firsts)
    return _attended(query, seen * _token_bytes(cache.encoded), sum(lens[: len(query)]))


def of_bidirectional(attention: Any, joined: torch.Tensor, inputs: int, *_: Any, **__: Any) -> LeastWork:
    rows, width = joined.shape
    return LeastWork(joined.nbytes * 4 / 3, 4.0 * rows * (rows // inputs) * width / 3)


def of_patch_attention(
    attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pictures: int
) -> LeastWork:
    moved = 2 * query.nbytes + key.nbytes + value.nbytes
    return LeastWork(moved, 4.0 * query.numel() * (len(key) // pictures))


def of_formed_activation(form: Form, mlp: GatedMLP | MLP, x: torch.Tensor) -> LeastWork:
    """An activation that ends in a product's form, which may have 8 bits."""
    outputs = x.numel() // (2 if isinstance(mlp, GatedMLP) else 1)
    return LeastWork(x.nbytes + outputs * (1 if isinstance(form, (Int8Form, BlockForm)) else x.itemsize))


def of_gate(mlp: Any, gate_up: torch.Tensor, *_: Any, **__: Any) -> LeastWork:
    return LeastWork(1.5 * gate_up.nbytes)


def of_activation(mlp: Any, inner: torch.Tensor, *_: Any, **__: Any) -> LeastWork:
    return LeastWork(2 * inner.nbytes)


def of_embedding(decoder: Decoder, input_ids: torch.Tensor, *_: Any, **__: Any) -> LeastWork:
    return LeastWork(2 * len(input_ids) * decoder.config.hidden_size * decoder.dtype.itemsize)


def of_sampling(logits: torch.Tensor, *_: Any, **__: Any) -> LeastWork:
    return LeastWork(logits.nbytes)


def _attended(query: torch.Tensor, cached: float, pairs: int) -> LeastWork:
    return LeastWork(2 * query.nbytes + cached, 4.0 * pairs * query.shape[1] * query.shape[2])


def _token_bytes(cache: LayerCache) -> float:
    """Bytes of one token's keys and values, with their scales."""
    return cache.nbytes / (cache.keys.shape[0] * cache.keys.shape[2])
