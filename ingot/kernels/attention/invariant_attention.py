"""Causal attention whose result for a token has the same bits in any step and beside any other request.

o = softmax(scale q K^T) V with one order of every sum: keys are taken in tiles of BLOCK_N and spans of SPAN
tokens, both at fixed multiples of their size. A span is an online softmax of its own; spans are merged in
ascending order. A prompt's tile of queries walks the spans one after another; a decoding token has a program
per span and a second kernel that merges them. Both round alike: products run on tensor cores, no product and
sum are contracted, and weights are summed as integers, which have no order.

    out = invariant_attention(q, cache, Sequences(block_tables, seq_lens, 4096, query_start), scoring)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.attention.attention_arguments import (
    Scoring,
    Sequences,
    expect_attention,
    expect_queries,
)
from ingot.kernels.attention.invariant_spans import finish, invariant_meet_kernel, meet, sum_rows
from ingot.kernels.attention.score_exponents import (
    LEAST_SCORE,
    plain_attention,
    score_factors,
    softcapped,
)
from ingot.kernels.cache.cache_tile import tile_rows
from ingot.kernels.cache.int8_cache_values import knows_asm, widened
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.kernel_checks import next_power_of_two, runs_on_gpu

SPAN = 128  # tokens; defines the result, like BLOCK_N, so it is no tile choice

# Warps and stages by query rows of a tile, on an H200 in 16 bits. They change no bit.
ROW_TILES = {16: (4, 2), 32: (4, 2), 64: (4, 2), 128: (8, 3)}
FEW_PROGRAMS = 64  # per span: two warps are as fast as four until the multiprocessors are full


@triton.jit
def _attend(
    acc_all: tl.tensor,
    total_all: tl.tensor,
    top_all: tl.tensor,
    acc: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    q: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lower: tl.tensor,
    upper: tl.tensor,
    positions: tl.tensor,
    seq_len: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Take the key tiles from ``lower`` to ``upper``; where a span begins, the one before is merged.

    With scales keys and values are in 8 bits; each is dequantized and rounded to the dtype of q by itself,
    since a scale shared by a tile would depend on its tokens. Products sum in a wide cache's order.
    """
    cols = tl.arange(0, BLOCK_D)
    for tile in range(lower, upper, BLOCK_N):
        if not SPLIT:  # noqa: SIM102 - one condition is known when compiling, the other is not
            if tile % SPAN == 0:
                acc_all, total_all, top_all = meet(acc_all, total_all, top_all, acc, total, top)
                acc = tl.zeros_like(acc)
                total = tl.zeros_like(total)
                top = tl.full(top.shape, LEAST_SCORE, dtype=tl.float32)
        tokens = tile + tl.arange(0, BLOCK_N)
        rows = tile_rows(table_ptr, tile, seq_len, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
        offsets = rows[:, None] + cols[None, :]
        mask = (tokens < seq_len)[:, None] & (cols < HEAD_DIM)[None, :]
        if MASKED or HEAD_DIM < BLOCK_D:
            k = tl.load(key_ptr + offsets, mask=mask, other=0.0)
        else:
            k = tl.load(key_ptr + offsets)
        if key_scale_ptr is not None:
            scales = tl.load(key_scale_ptr + rows // HEAD_DIM, mask=tokens < seq_len, other=0.0)
            k = (widened(k, tl.float32, ASM, True) * scales[:, None]).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if CAP > 0.0:
            scores = softcapped(scores, CAP)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + sum_rows(p)
        if MASKED or HEAD_DIM < BLOCK_D:
            v = tl.load(value_ptr + offsets, mask=mask, other=0.0)
        else:
            v = tl.load(value_ptr + offsets)
        if value_scale_ptr is not None:
            scales = tl.load(value_scale_ptr + rows // HEAD_DIM, mask=tokens < seq_len, other=0.0)
            v = (widened(v, tl.float32, ASM, True) * scales[:, None]).to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc_all, total_all, top_all, acc, total, top


@triton.jit(do_not_specialize=["table_stride", "window"])
def invariant_attention_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """All spans of BLOCK_M queries of one head; with SPLIT one span of one query of a group of heads, whose
    sums are stored, [B, HEADS, spans, HEAD_DIM], with their totals and tops.
    """
    request = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    span = tl.program_id(0)
    if SPLIT:
        kv_head = tl.program_id(1)
        heads = kv_head * GROUP + rows
        inside = rows < GROUP
        token = request + rows * 0
        first_position = seq_len - 1
        positions = first_position + rows * 0
        upper = tl.minimum(span * SPAN + SPAN, seq_len)
        lower = span * SPAN
        if lower >= upper:
            return
    else:
        query_start = tl.load(query_start_ptr + request)
        num_queries = tl.load(query_start_ptr + request + 1) - query_start
        tile_m = tl.num_programs(0) - 1 - span  # the last queries, with most keys, go first
        if tile_m * BLOCK_M >= num_queries:
            return
        kv_head = tl.program_id(1) // GROUP
        heads = tl.program_id(1) + rows * 0
        inside = tile_m * BLOCK_M + rows < num_queries
        token = query_start + tile_m * BLOCK_M + rows
        first_position = seq_len - num_queries + tile_m * BLOCK_M
        positions = first_position + rows
        upper = tl.minimum(first_position + BLOCK_M, seq_len)
        lower = first_position * 0
    place = token.to(tl.int64) * q_stride + heads * HEAD_DIM
    q_mask = inside[:, None] & (cols < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + place[:, None] + cols[None, :], mask=q_mask, other=0.0)
    # Keys before ``full`` are seen by every query of the tile, keys from ``upper`` on by none.
    full = tl.minimum(tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N, upper)
    if HAS_WINDOW:
        lower = tl.maximum(tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N, lower)
        full = lower
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], LEAST_SCORE, dtype=tl.float32)
    acc_all, total_all, top_all = acc, total, top
    key_ptr += kv_head * head_stride
    value_ptr += kv_head * head_stride
    if key_scale_ptr is not None:
        key_scale_ptr += kv_head * (head_stride // HEAD_DIM)
        value_scale_ptr += kv_head * (head_stride // HEAD_DIM)
    table_ptr = tables_ptr + request * table_stride
    if not HAS_WINDOW:
        acc_all, total_all, top_all, acc, total, top = _attend(
            acc_all, total_all, top_all, acc, total, top, q, key_ptr, value_ptr, key_scale_ptr,
            value_scale_ptr, table_ptr, lower, full, positions, seq_len, block_stride, token_stride,
            scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, SPAN, False, False, SPLIT, CAP, ASM,
        )  # fmt: skip
    acc_all, total_all, top_all, acc, total, top = _attend(
        acc_all, total_all, top_all, acc, total, top, q, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
        table_ptr, full, upper, positions, seq_len, block_stride, token_stride, scale_log2, window, HEAD_DIM,
        BLOCK_D, BLOCK_SIZE, BLOCK_N, SPAN, True, HAS_WINDOW, SPLIT, CAP, ASM,
    )  # fmt: skip
    if SPLIT:
        target = (request * HEADS + heads) * tl.num_programs(0) + span
        tl.store(out_ptr + (target * HEAD_DIM)[:, None] + cols[None, :], acc, mask=q_mask)
        tl.store(stats_ptr + target * 2, total, mask=inside)
        tl.store(stats_ptr + target * 2 + 1, top, mask=inside)
    else:
        acc, total, top = meet(acc_all, total_all, top_all, acc, total, top)
        target = token.to(tl.int64) * (HEADS * HEAD_DIM) + heads * HEAD_DIM
        out = finish(acc, total, out_ptr.dtype.element_ty)
        tl.store(out_ptr + target[:, None] + cols[None, :], out, mask=q_mask)


def key_tile(head_dim: int, itemsize: int) -> int:
    """Keys per tile; defines the result, so it is the same for every step."""
    if itemsize > 2:
        return 32 if head_dim <= 64 else 16
    return 64 if head_dim <= 128 else 32


def query_tile(max_query_len: int, head_dim: int, itemsize: int, narrow: bool = False) -> int:
    """Query rows per tile, one of ``ROW_TILES``; changes no bit. ``narrow``: a cache in 8 bits."""
    if itemsize > 2 or max_query_len <= 16:
        return 16
    return 64 if max_query_len <= 64 or head_dim > 128 or narrow else 128


def invariant_attention_triton(
    q: torch.Tensor, cache: PagedCache, sequences: Sequences, scoring: Scoring
) -> torch.Tensor:
    """Launch the kernels; arguments as in :func:`invariant_attention`, unchecked."""
    num_tokens, num_heads, head_dim = q.shape
    block_tables, seq_lens, max_seq_len, query_start, max_query_len = sequences
    scale, window, softcap = scoring
    num_kv_heads, batch = cache.num_kv_heads, seq_lens.shape[0]
    split = max_query_len == 1
    group = num_heads // num_kv_heads
    rows = (
        max(next_power_of_two(group), 16)
        if split
        else query_tile(max_query_len, head_dim, q.element_size(), cache.scales is not None)
    )
    warps, stages = ROW_TILES[min(rows, 128)]
    if split and batch * num_kv_heads <= FEW_PROGRAMS:
        warps = 2
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    spans = max(triton.cdiv(max_seq_len, SPAN), 1)
    target, stats = out, None
    if split:
        target = torch.empty((batch, num_heads, spans, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((batch, num_heads, spans, 2), dtype=torch.float32, device=q.device)
    grid = (spans, num_kv_heads, batch) if split else (triton.cdiv(max_query_len, rows), num_heads, batch)
    if not num_tokens or not min(grid):
        return out
    factor, cap = score_factors(scale, softcap)
    shared = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(next_power_of_two(head_dim), 16),
        "HAS_WINDOW": window > 0,
        "SPAN": SPAN,
        "enable_fp_fusion": False,
    }
    invariant_attention_kernel[grid](
        q,
        *cache.pointers,
        block_tables,
        query_start,
        seq_lens,
        target,
        stats,
        q.stride(0),
        block_tables.stride(0),
        *cache.keys.stride()[:3],
        factor,
        window,
        HEADS=num_heads,
        GROUP=group,
        BLOCK_SIZE=cache.block_size,
        SPLIT=split,
        CAP=cap,
        ASM=knows_asm(q),
        BLOCK_M=rows,
        BLOCK_N=key_tile(head_dim, q.element_size()),
        num_stages=stages if q.element_size() == 2 else 1,
        **shared,
        num_warps=warps if head_dim <= 128 else 8,
    )
    if split:
        invariant_meet_kernel[(num_heads, batch)](
            target, stats, seq_lens, out, window, spans, STAGES=3, num_warps=1, **shared
        )
    return out


def invariant_attention_reference(
    q: torch.Tensor, cache: PagedCache, sequences: Sequences, scoring: Scoring
) -> torch.Tensor:
    """The PyTorch reference of :func:`invariant_attention`: each token by itself."""
    assert sequences.query_start is not None
    scale, window, softcap = scoring
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, num_kv_heads = sequences.query_start.tolist(), cache.num_kv_heads
    for row, length in enumerate(sequences.seq_lens.tolist()):
        begin, stop = starts[row], starts[row + 1]
        for token in range(begin, stop) if length else ():
            end = length - stop + token + 1
            first = max(end - window, 0) if window else 0
            keys, values = cache.gather(sequences.block_tables[row], first, end, q.dtype)
            grouped = q[token].unflatten(0, (num_kv_heads, -1))[None]  # [1, num_kv_heads, group, head_dim]
            attended = plain_attention(grouped, keys[None], values[None], scale, softcap)
            out[token] = attended.flatten(0, 2)
    return out


def invariant_attention(
    q: torch.Tensor, cache: PagedCache, sequences: Sequences, scoring: Scoring
) -> torch.Tensor:
    """o = softmax(scale q K^T + causal mask) V over the cached keys (fixed splits: Flash-Decoding, 2023).

    To the bit, a token's output depends only on its query and the keys and values that it sees.

    Args:
        q: [T, num_heads, head_dim] fp16, bf16 or fp32, requests end to end; head_dim 8 to 256.
        cache: in the dtype of q, or in 8 bits; already holds the new tokens.
        sequences: with ``query_start``, whose last entry is T; max_query_len 1: every request has one token.

    Returns:
        [T, num_heads, head_dim], dtype of q.
    """
    expect_attention(q, cache, sequences, scoring)
    expect_queries(q, sequences)
    if runs_on_gpu(q):
        return invariant_attention_triton(q, cache, sequences, scoring)
    return invariant_attention_reference(q, cache, sequences, scoring)
