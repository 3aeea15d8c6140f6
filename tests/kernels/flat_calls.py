"""Ops on queries, keys and values by tensors and numbers one by one, as tests vary them.

Owns how these become the groups that the ops take: the only place of the tests that does. Knows no test.

    out = paged_attention(q, keys, values, block_tables, seq_lens, 128**-0.5, 4096, window, softcap=50.0)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.kernels.attention import invariant_attention as invariant
from ingot.kernels.attention import paged_attention as paged
from ingot.kernels.attention import paged_stream as stream
from ingot.kernels.attention import prefill_attention as prefill
from ingot.kernels.attention.attention_arguments import AttentionOutput, Scoring, Sequences, TileList
from ingot.kernels.cache import rope_kv_write as rope
from ingot.kernels.cache.cache_scales import CacheScales
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.cache.qkv_placement import HeadNorms, Placement, QkvHeads, TokenPlaces
from ingot.kernels.product.few_rows import small_qkv as product
from tests.kernels.numerics import launched

Op = Callable[..., torch.Tensor]
Tensor = torch.Tensor
Tiles = dict[str, int] | None


def _decodes(op: Op) -> Op:
    def call(
        q: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
        scale: float, max_seq_len: int, window: int = 0, tiles: Tiles = None, out: Tensor | None = None,
        arrivals: Tensor | None = None, out_scales: Any = None, scales: CacheScales | None = None,
        softcap: float = 0.0, steady: bool = False, programs: int | None = None,
    ) -> Tensor:  # fmt: skip
        return op(
            q,
            PagedCache(key_cache, value_cache, scales),
            Sequences(block_tables, seq_lens, max_seq_len),
            Scoring(scale, window, softcap),
            tiles,
            AttentionOutput(out, out_scales, steady),
            arrivals,
            **({} if programs is None else {"programs": programs}),
        )

    return call


def _chunks(op: Op) -> Op:
    def call(
        q: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, query_start: Tensor,
        seq_lens: Tensor, max_query_len: int, scale: float, window: int = 0, tiles: Tiles = None,
        out: Tensor | None = None, out_scales: Any = None, scales: CacheScales | None = None,
        softcap: float = 0.0, tile_list: Tensor | None = None, parts: int = 0,
        arrivals: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return op(
            q,
            PagedCache(key_cache, value_cache, scales),
            Sequences(block_tables, seq_lens, 2**20, query_start, max_query_len),
            Scoring(scale, window, softcap),
            tiles,
            AttentionOutput(out, out_scales),
            None if tile_list is None else TileList(tile_list, parts),
            arrivals,
        )

    return call


def _invariant(op: Op) -> Op:
    def call(
        q: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, query_start: Tensor,
        seq_lens: Tensor, max_query_len: int, max_seq_len: int, scale: float, window: int = 0,
        scales: CacheScales | None = None, softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        return op(
            q,
            PagedCache(key_cache, value_cache, scales),
            Sequences(block_tables, seq_lens, max_seq_len, query_start, max_query_len),
            Scoring(scale, window, softcap),
        )

    return call


def _writes(op: Op) -> Op:
    def call(
        qkv: Any, cos_sin: Tensor | None, rope_rows: Tensor, positions: Tensor, slot_mapping: Tensor,
        key_cache: Tensor, value_cache: Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
        q_norm_weight: Tensor | None = None, k_norm_weight: Tensor | None = None, norm_eps: float = 0.0,
        logn_length: int = 0, tiles: Tiles = None, scales: CacheScales | None = None,
    ) -> Tensor:  # fmt: skip
        place = Placement(
            cos_sin,
            TokenPlaces(rope_rows, positions, slot_mapping),
            PagedCache(key_cache, value_cache, scales),
            QkvHeads(num_heads, num_kv_heads, head_dim, logn_length),
        )
        norms = None
        if q_norm_weight is not None and k_norm_weight is not None:
            norms = HeadNorms(q_norm_weight, k_norm_weight, norm_eps)
        return op(qkv, place, norms, **({} if tiles is None else {"tiles": tiles}))

    return call


def _products(op: Op, before: int) -> Op:
    """``before``: how many arguments come before the place."""

    def call(*given: Any, **tiles: Any) -> Tensor:
        product, place = given[:before], given[before:]
        logn = {"logn_length": tiles.pop("logn_length")} if "logn_length" in tiles else {}
        heads = QkvHeads(*place[6:], **logn)
        return op(
            *product, Placement(place[0], TokenPlaces(*place[1:4]), PagedCache(*place[4:6]), heads), **tiles
        )

    return call


paged_attention = _decodes(paged.paged_attention)
paged_attention_triton = _decodes(paged.paged_attention_triton)
paged_stream_triton = _decodes(stream.paged_stream_triton)
prefill_attention = _chunks(prefill.prefill_attention)
prefill_attention_triton = _chunks(prefill.prefill_attention_triton)
invariant_attention = _invariant(invariant.invariant_attention)
invariant_attention_triton = _invariant(invariant.invariant_attention_triton)
rope_kv_write = _writes(rope.rope_kv_write)
rope_kv_write_triton = _writes(launched(rope.rope_kv_write))
rope_kv_write_reference = _writes(rope.rope_kv_write_reference)
small_qkv = _products(product.small_qkv, 5)
small_qkv_triton = _products(launched(product.small_qkv), 5)
small_qkv_reference = _products(product.small_qkv_reference, 5)
small_int8_qkv = _products(product.small_int8_qkv, 3)
small_int8_qkv_triton = _products(launched(product.small_int8_qkv), 3)
small_int8_qkv_reference = _products(product.small_int8_qkv_reference, 3)
