"""Decode attention where every head has its own keys (MHA): fp32 vector sums, no matrix unit.

paged_attention_single_kernel[(num_splits, num_heads, batch)](q, keys, values, ...)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.attention.int8_heads import store_heads
from ingot.kernels.attention.paged_merge import arrive_last, merged_splits, rounded_product
from ingot.kernels.attention.score_exponents import LEAST_SCORE, softcapped
from ingot.kernels.cache.cache_tile import held_rows, split_bounds
from ingot.kernels.cache.int8_cache_values import query_words, widened, word_products, word_values
from ingot.kernels.launch_overlap import start_next, wait_for_previous


@triton.jit
def _load(
    ptr: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    wanted: tl.tensor,
    HEAD: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """A tile [BLOCK_N, columns], streamed past the caches; zeros from column HEAD on, unless WHOLE."""
    places = ptr + rows[:, None] + cols[None, :]
    if WHOLE:
        return tl.load(places, mask=wanted, eviction_policy="evict_first")
    mask = (cols < HEAD)[None, :] & wanted
    return tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _scales(
    key_scale_ptr: tl.tensor, value_scale_ptr: tl.tensor, rows: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """Scales of a tile's keys and values, [BLOCK_N] each; meaningless unless the cache is in 8 bits."""
    if key_scale_ptr is not None:
        k_scale = tl.load(key_scale_ptr + rows, mask=wanted)
        v_scale = tl.load(value_scale_ptr + rows, mask=wanted)
    else:
        k_scale, v_scale = rows, rows
    return k_scale, v_scale


@triton.jit
def _attend(
    q: tl.tensor,
    low: tl.tensor,
    step: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    seen: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    RUN: tl.constexpr,
    NARROW: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """One tile into the online softmax of each chain: (top, total, acc). NARROW: the cache is in 8 bits; with
    ``low`` it and the queries are words of four values (int8_cache_values.py).
    """
    chains: tl.constexpr = q.shape[0]
    width: tl.constexpr = q.shape[1]
    k = tl.reshape(k, (RUN, chains, width))  # a chain's tokens meet in one thread's registers
    v = tl.reshape(v, (RUN, chains, width))
    if low is not None:
        products = word_products(q[None, :, :], low[None, :, :], k, ASM)
        scores = tl.sum(products, axis=2).to(tl.float32) * step[None, :]  # [RUN, chains]
    else:
        wide_k = widened(k, tl.float32, ASM) if NARROW else k.to(tl.float32)
        scores = tl.sum(q[None, :, :] * wide_k, axis=2)
    if NARROW:
        scores = scores * tl.reshape(k_scale, (RUN, chains))
    if CAP > 0.0:
        scores = softcapped(scores, CAP)
    scores = tl.where(tl.reshape(seen, (RUN, chains)), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=0))
    p = tl.exp2(scores - new_top[None, :])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(p, axis=0)
    if NARROW:
        p = p * tl.reshape(v_scale, (RUN, chains))
    if low is not None:
        wide_v = word_values(v, ASM)
    else:
        wide_v = widened(v, tl.float32, ASM) if NARROW else v.to(tl.float32)
    acc = acc * fade[:, None] + tl.sum(p[:, :, None] * wide_v, axis=0)
    return new_top, total, acc


@triton.jit
def paged_attention_single_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    out_zero_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHAINS: tl.constexpr,
    PREFETCH: tl.constexpr,
    CAP: tl.constexpr,
    STATIC: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One split of one head, and the merge of the head's splits if this is the last to arrive.

    A tile's BLOCK_N tokens form CHAINS chains, each with its own online softmax; they are merged once, after
    the loop, so that no warp waits for another while it streams. With OVERLAP 4 the first tile is loaded
    before the wait, unless it holds the newest token; with PREFETCH each further one while the one before is
    computed. With scales keys and values are in 8 bits, and rows count tokens; int8 is read in words of four
    where heads have whole words and queries 16 bits.
    """
    start_next(OVERLAP)
    if OVERLAP < 4:
        wait_for_previous(OVERLAP)
    split, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits, num_heads = tl.num_programs(0), tl.num_programs(1)
    seq_len = tl.load(seq_lens_ptr + request)
    first, base, length = split_bounds(seq_len, window, MAX_SPLITS, MIN_TOKENS, BLOCK_N, HAS_WINDOW)
    start = base + split * length
    end = tl.minimum(start + length, seq_len)
    live = tl.maximum(tl.cdiv(seq_len - base, length), 1)
    run: tl.constexpr = BLOCK_N // CHAINS
    order = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    in_head = cols < HEAD_DIM
    key_ptr += head * head_stride
    value_ptr += head * head_stride
    NARROW: tl.constexpr = key_scale_ptr is not None
    SHORT: tl.constexpr = q_ptr.dtype.element_ty.primitive_bitwidth == 16  # as precise as 15 bits of words
    WORDS: tl.constexpr = SHORT and key_ptr.dtype.element_ty == tl.int8 and HEAD_DIM % 4 == 0
    EACH: tl.constexpr = 4 if WORDS else 1  # numbers of a column
    HEAD: tl.constexpr = HEAD_DIM // EACH
    WHOLE: tl.constexpr = HEAD_DIM == BLOCK_D
    if WORDS:
        key_ptr = key_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        value_ptr = value_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    held = tl.arange(0, BLOCK_D // EACH)
    if NARROW:
        key_scale_ptr += head * (head_stride // HEAD_DIM)
        value_scale_ptr += head * (head_stride // HEAD_DIM)
        block_stride = block_stride // HEAD_DIM
        token_stride = token_stride // HEAD_DIM
    WIDTH: tl.constexpr = HEAD if NARROW else 1  # columns of a row's unit
    table_ptr = tables_ptr + request * table_stride
    rows = held_rows(table_ptr, start, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
    wanted = start < end
    old = wanted & (start + BLOCK_N < seq_len)  # the newest token's keys are there only after the wait
    if OVERLAP >= 4:
        k = _load(key_ptr, rows * WIDTH, held, old, HEAD, WHOLE)
        v = _load(value_ptr, rows * WIDTH, held, old, HEAD, WHOLE)
        k_scale, v_scale = _scales(key_scale_ptr, value_scale_ptr, rows, old)
        wait_for_previous(OVERLAP)
    if split >= live:
        return
    if OVERLAP >= 4:
        late = (wanted & (start + BLOCK_N >= seq_len)) & (held < HEAD)[None, :]
        places = (rows * WIDTH)[:, None] + held[None, :]
        k = tl.load(key_ptr + places, mask=late, other=k)
        v = tl.load(value_ptr + places, mask=late, other=v)
        if NARROW:
            new = wanted & (start + BLOCK_N >= seq_len)
            k_scale = tl.load(key_scale_ptr + rows, mask=new, other=k_scale)
            v_scale = tl.load(value_scale_ptr + rows, mask=new, other=v_scale)
    else:
        k = _load(key_ptr, rows * WIDTH, held, wanted, HEAD, WHOLE)
        v = _load(value_ptr, rows * WIDTH, held, wanted, HEAD, WHOLE)
        k_scale, v_scale = _scales(key_scale_ptr, value_scale_ptr, rows, wanted)
    rows = held_rows(table_ptr, start + BLOCK_N, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
    places = q_ptr + request * q_stride + head * HEAD_DIM + tl.arange(0, CHAINS)[:, None] * 0 + cols[None, :]
    q = tl.load(places, mask=in_head[None, :], other=0.0).to(tl.float32) * scale_log2  # a row a chain
    low, step = None, None
    if WORDS:
        q, low, step = query_words(q)
    top = tl.full([CHAINS], LEAST_SCORE, dtype=tl.float32)
    total = tl.zeros([CHAINS], dtype=tl.float32)
    acc = tl.zeros([CHAINS, BLOCK_D], dtype=tl.float32)
    # Bytes carried to the next iteration would be unpacked at the end of this one, which would wait for them.
    AHEAD: tl.constexpr = PREFETCH > 0 and (WORDS or not NARROW)
    if AHEAD:
        for tile in tl.range(start, end, BLOCK_N, num_stages=1):
            later = tile + BLOCK_N
            next_k = _load(key_ptr, rows * WIDTH, held, later < end, HEAD, WHOLE)
            next_v = _load(value_ptr, rows * WIDTH, held, later < end, HEAD, WHOLE)
            next_k_scale, next_v_scale = _scales(key_scale_ptr, value_scale_ptr, rows, later < end)
            rows = held_rows(table_ptr, later + BLOCK_N, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
            seen = (tile + order < end) & (tile + order >= first)
            top, total, acc = _attend(q, low, step, k, v, k_scale, v_scale, seen, top, total, acc, run,
                                      NARROW, CAP, ASM)  # fmt: skip
            k, v, k_scale, v_scale = next_k, next_v, next_k_scale, next_v_scale
    else:
        seen = (start + order < end) & (start + order >= first)
        top, total, acc = _attend(q, low, step, k, v, k_scale, v_scale, seen, top, total, acc, run, NARROW,
                                  CAP, ASM)  # fmt: skip
        for tile in tl.range(start + BLOCK_N, end, BLOCK_N, num_stages=1):
            k = _load(key_ptr, rows * WIDTH, held, tile < end, HEAD, WHOLE)
            v = _load(value_ptr, rows * WIDTH, held, tile < end, HEAD, WHOLE)
            k_scale, v_scale = _scales(key_scale_ptr, value_scale_ptr, rows, tile < end)
            rows = held_rows(table_ptr, tile + BLOCK_N, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
            seen = (tile + order < end) & (tile + order >= first)
            top, total, acc = _attend(q, low, step, k, v, k_scale, v_scale, seen, top, total, acc, run,
                                      NARROW, CAP, ASM)  # fmt: skip
    highest = tl.max(top, axis=0)
    weights = tl.exp2(top - highest)
    total_all = tl.sum(rounded_product(total, weights), axis=0)
    divisor = tl.where(total_all == 0.0, 1.0, total_all)
    # Without a key the tile is undefined, but a padding row must be zeros.
    out = tl.where(total_all == 0.0, 0.0, tl.sum(rounded_product(acc, weights[:, None]), axis=0) / divisor)
    own = head + tl.arange(0, 1)
    this = request * num_heads + own
    if live == 1:
        store_heads(out[None, :], out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, this, own, this >= 0,
                    HEAD_DIM, 1, STATIC, BITS)  # fmt: skip
        return
    if arrivals_ptr is not None:
        place = (request * num_heads + head) * num_splits
        tl.store(partial_ptr + (place + split) * HEAD_DIM + cols, out, mask=in_head)
        tl.store(lse_ptr + place + split, highest + tl.log2(divisor))
        if arrive_last(arrivals_ptr + request * num_heads + head, live):
            BLOCK_S: tl.constexpr = triton.next_power_of_2(MAX_SPLITS)
            merged = merged_splits(partial_ptr, lse_ptr, place, live, HEAD_DIM, BLOCK_D, BLOCK_S)
            store_heads(merged[None, :], out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, this, own, this >= 0,
                        HEAD_DIM, 1, STATIC, BITS)  # fmt: skip
