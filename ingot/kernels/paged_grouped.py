"""Decode attention where several queries share a head of keys (GQA, MQA): they are the rows of a product.

Owns the kernel that streams one split of one key-value head through the matrix unit. Knows no launcher and no
merge.

    paged_attention_grouped_kernel[(num_splits, num_kv_heads, batch)](q, keys, values, ...)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.overlap import start_next, wait_for_previous
from ingot.kernels.paged_merge import LEAST_SCORE
from ingot.kernels.paged_tile import prefetch_split, split_bounds, tile_rows


@triton.jit
def paged_attention_grouped_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One split of one key-value head: the queries that share it are the rows of two matrix products."""
    start_next(OVERLAP)
    if OVERLAP < 4:
        wait_for_previous(OVERLAP)
    split, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits, num_heads = tl.num_programs(0), tl.num_programs(1) * GROUP
    seq_len = tl.load(seq_lens_ptr + request)
    first, base, length = split_bounds(seq_len, window, MAX_SPLITS, MIN_TOKENS, BLOCK_N, HAS_WINDOW)
    start = base + split * length
    end = tl.minimum(start + length, seq_len)
    if OVERLAP >= 4:
        prefetch_split(key_ptr + kv_head * head_stride, value_ptr + kv_head * head_stride,
                       tables_ptr + request * table_stride, start, end, block_stride, token_stride,
                       HEAD_DIM, BLOCK_SIZE, BLOCK_N)  # fmt: skip
        wait_for_previous(OVERLAP)
    if (start >= end) & (num_splits > 1):
        return
    group = tl.arange(0, BLOCK_G)
    cols = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + group
    q_mask = (group < GROUP)[:, None] & (cols < HEAD_DIM)[None, :]
    q = tl.load(
        q_ptr + request * q_stride + (heads * HEAD_DIM)[:, None] + cols[None, :], mask=q_mask, other=0.0
    )
    top = tl.full([BLOCK_G], LEAST_SCORE, dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    key_ptr += kv_head * head_stride
    value_ptr += kv_head * head_stride
    for tile in range(start, end, BLOCK_N):
        tokens = tile + tl.arange(0, BLOCK_N)
        rows = tile_rows(
            tables_ptr + request * table_stride, tile, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N
        )
        mask = (tokens < end)[:, None]
        if HEAD_DIM < BLOCK_D:
            mask = mask & (cols < HEAD_DIM)[None, :]
        k = tl.load(key_ptr + rows[:, None] + cols[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        seen = tokens < end
        if HAS_WINDOW:
            seen = seen & (tokens >= first)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, axis=1)
        v = tl.load(value_ptr + rows[:, None] + cols[None, :], mask=mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    divisor = tl.where(total == 0.0, 1.0, total)
    place = (request * num_heads + heads) * num_splits + split
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (place * HEAD_DIM)[:, None] + cols[None, :], out, mask=q_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + place, top + tl.log2(divisor), mask=group < GROUP)
