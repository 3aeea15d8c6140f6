"""The kernel of the QKV product of 2 to 64 rows, with rotary embedding, logn scaling and cache write.

Owns how a tile's weight rows pair up for the rotation and where its channels go: a tile lies within one head,
so that whole vectors are stored. Knows no norm; ``small_qkv.py`` launches it and says what it computes.

    small_qkv_matrix_kernel[(heads * tiles_of_a_head,)](x, weight, bias, ...)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.fragment_product import row_order
from ingot.kernels.matrix_product import weight_tile
from ingot.kernels.overlap import start_next
from ingot.kernels.small_product import split_pairs


@triton.jit
def turns(
    heads: tl.tensor,
    pair: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    table_ptr: tl.tensor,
    table_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    table_stride: tl.tensor,
    inverse_log: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LOGN: tl.constexpr,
) -> tl.tensor:
    """Cosines and sines of pairs and tokens, [PAIRS, BLOCK_T], scaled by logn where the head is a query's."""
    real = token < tokens
    rotary = real[None, :] & (pair < HALF)[:, None]
    places = pair[:, None] + token[None, :] * 0
    if HALF > 0:
        places = (tl.load(table_rows_ptr + token, mask=real, other=0) * table_stride)[None, :] + pair[:, None]
        cos = tl.load(table_ptr + places, mask=rotary, other=1.0)
        sin = tl.load(table_ptr + places + HALF, mask=rotary, other=0.0)
    else:
        cos = tl.full(places.shape, 1.0, dtype=tl.float32)
        sin = tl.full(places.shape, 0.0, dtype=tl.float32)
    if LOGN:
        position = tl.load(positions_ptr + token, mask=real, other=0).to(tl.float32)
        factor = tl.maximum(tl.log(position + 1.0) * inverse_log, 1.0)[None, :]
        factor = tl.where((heads < HEADS)[:, None], factor, 1.0)
    else:
        factor = tl.full(places.shape, 1.0, dtype=tl.float32)
    return cos, sin, factor


@triton.jit
def _channels(pair: tl.tensor, HEAD_DIM: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """The first and the second channel of a head's pairs: the rotary ones, then the others."""
    if 2 * HALF == HEAD_DIM:
        first, second = pair, pair + HALF
    else:
        first = tl.where(pair < HALF, pair, pair + HALF)
        second = tl.where(pair < HALF, pair + HALF, pair + HEAD_DIM // 2)
    return first, second


@triton.jit
def small_qkv_matrix_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    scale_ptr: tl.tensor,
    scale_stride: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    inverse_log: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_scale_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOGN: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """SHARE channel pairs of one head, at most BLOCK_N / 2, of every row."""
    if OVERLAP == 2:
        start_next(OVERLAP)
    PAIRS: tl.constexpr = BLOCK_N // 2
    CHUNKS: tl.constexpr = (HEAD_DIM // 2 + SHARE - 1) // SHARE
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0)
    head, start = tile // CHUNKS, tile % CHUNKS * SHARE
    lane = row_order(BLOCK_N, FRAGMENTS)
    firsts, seconds = _channels(tl.minimum(start + lane % PAIRS, HEAD_DIM // 2 - 1), HEAD_DIM, HALF)
    rows = head * HEAD_DIM + tl.where(tl.arange(0, BLOCK_N) < PAIRS, firsts, seconds)
    live = None if SHARE == PAIRS else lane % PAIRS < SHARE
    acc = weight_tile(x_ptr, x_stride, x_scale_ptr, x_scale_stride, tokens, weight_ptr, weight_stride,
                      scale_ptr, scale_stride, zero_ptr, rows, live, 0, STEPS,
                      (head * HEAD_DIM + start) // 16, K, BITS, GROUP, BLOCK_T,
                      BLOCK_N, BLOCK_K, PAIRS // 16, HEAD_DIM // 32,
                      (HEADS + 2 * KV_HEADS) * HEAD_DIM // 16 - 1,
                      WARPS, FRAGMENTS, PREFETCH, OVERLAP, ASM)  # fmt: skip
    if OVERLAP == 4:
        start_next(OVERLAP)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    a, b = split_pairs(acc.to(q_ptr.dtype.element_ty).to(tl.float32), PAIRS, BLOCK_T)
    token = tl.arange(0, BLOCK_T)
    real = token < tokens
    pair = start + row_order(PAIRS, FRAGMENTS)
    first, second = _channels(pair, HEAD_DIM, HALF)
    if head < HEADS + KV_HEADS:
        cos, sin, factor = turns(pair * 0 + head, pair, token, tokens, table_ptr, table_rows_ptr,
                                 positions_ptr, table_stride, inverse_log, HEADS, HALF, LOGN)  # fmt: skip
        turned = (a * cos - b * sin) * factor
        b = (b * cos + a * sin) * factor
        a = turned
    a, b = a.to(q_ptr.dtype.element_ty), b.to(q_ptr.dtype.element_ty)
    inside = (pair < tl.minimum(start + SHARE, HEAD_DIM // 2))[:, None] & real[None, :]
    if head < HEADS:
        places = q_ptr + (token * (HEADS * HEAD_DIM))[None, :] + head * HEAD_DIM
        tl.store(places + first[:, None], a, mask=inside)
        tl.store(places + second[:, None], b, mask=inside)
    else:
        slot = tl.load(slots_ptr + token, mask=real, other=-1)
        block = slot // BLOCK_SIZE
        offset = (block * block_stride + (slot - block * BLOCK_SIZE) * token_stride)[None, :]
        inside = inside & (slot >= 0)[None, :]
        if head < HEADS + KV_HEADS:
            places = key_ptr + offset + (head - HEADS) * head_stride
            tl.store(places + first[:, None], a, mask=inside)
            tl.store(places + second[:, None], b, mask=inside)
        else:
            places = value_ptr + offset + (head - HEADS - KV_HEADS) * head_stride
            tl.store(places + first[:, None], a, mask=inside)
            tl.store(places + second[:, None], b, mask=inside)
