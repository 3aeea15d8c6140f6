"""The kernel of the QKV product of 2 to 64 rows, with rotary embedding, logn scaling and cache write.

Owns how a tile's weight rows pair up for the rotation and where its channels go: a tile lies within one head,
so that whole vectors are stored. Knows no norm; ``small_qkv.py`` launches it and says what it computes.

    small_qkv_matrix_kernel[(heads * tiles_of_a_head,)](x, weight, bias, ...)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.overlap import start_next
from ingot.kernels.product.matrix_product import weight_tile
from ingot.kernels.product.product_ends import channels, store_heads


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
    lane = tl.arange(0, BLOCK_N)
    firsts, seconds = channels(tl.minimum(start + lane % PAIRS, HEAD_DIM // 2 - 1), HEAD_DIM, HALF)
    rows = head * HEAD_DIM + tl.where(lane < PAIRS, firsts, seconds)
    live = None if SHARE == PAIRS else lane % PAIRS < SHARE
    acc = weight_tile(x_ptr, x_stride, x_scale_ptr, x_scale_stride, tokens, weight_ptr, weight_stride,
                      scale_ptr, scale_stride, zero_ptr, rows, live, 0, STEPS, K, BITS, GROUP, BLOCK_T,
                      BLOCK_N, BLOCK_K, PREFETCH, OVERLAP, ASM)  # fmt: skip
    if OVERLAP == 4:
        start_next(OVERLAP)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    store_heads(acc, head, start + tl.arange(0, PAIRS), tl.minimum(start + SHARE, HEAD_DIM // 2), table_ptr,
                table_rows_ptr, positions_ptr, slots_ptr, q_ptr, key_ptr, value_ptr, tokens, table_stride,
                block_stride, head_stride, token_stride, inverse_log, HEADS, KV_HEADS, HEAD_DIM, HALF,
                BLOCK_SIZE, LOGN, PAIRS, BLOCK_T)  # fmt: skip
