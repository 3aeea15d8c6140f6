"""The second half of decode attention: the splits of a head are merged into one output.

paged_attention_merge_kernel[(num_heads, batch)](partial, lse, seq_lens, out, ...)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.attention.int8_heads import store_heads
from ingot.kernels.attention.score_exponents import LEAST_SCORE
from ingot.kernels.cache.cache_tile import split_bounds
from ingot.kernels.launch_overlap import start_next, wait_for_previous


@triton.jit
def rounded_product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a * b in fp32, rounded before anything is added to it.

    The compiler would fuse a product with the first addition of a sum over the lanes of a warp. Each lane
    then adds its own, unrounded product to the other's rounded one: their copies of the sum differ in the
    last bit, and an output's scale may come from another lane than its values.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def merged_splits(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    place: tl.tensor,
    live: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_D] fp32 of the ``live`` splits from row ``place`` on, weighted by their sums of exponentials."""
    splits = tl.arange(0, BLOCK_S)
    cols = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + place + splits, mask=splits < live, other=float("-inf"), cache_modifier=".cg")
    partial = tl.load(
        partial_ptr + ((place + splits) * HEAD_DIM)[:, None] + cols[None, :],
        mask=(splits < live)[:, None] & (cols < HEAD_DIM)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    weights = tl.exp2(lse - tl.maximum(tl.max(lse, axis=0), LEAST_SCORE))
    total = tl.sum(weights, axis=0)
    return tl.sum(rounded_product(partial, weights[:, None]), axis=0) / tl.where(total == 0.0, 1.0, total)


@triton.jit
def arrive_last(count_ptr: tl.tensor, expected: tl.tensor) -> tl.tensor:
    """Count this program; true for the last of ``expected``, which sees all stores of the others and leaves
    the count at zero for the next launch.
    """
    tl.debug_barrier()  # every thread's stores come before the one atomic
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(count_ptr, 0)
    return last


@triton.jit
def paged_attention_merge_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    out_zero_ptr: tl.tensor,
    q_ptr: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STATIC: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Merge the splits of one head; zeros where there was no key. Of the queries only the dtype matters."""
    start_next(OVERLAP)
    if OVERLAP < 4:
        wait_for_previous(OVERLAP)
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    _, base, length = split_bounds(seq_len, window, MAX_SPLITS, MIN_TOKENS, BLOCK_N, HAS_WINDOW)
    live = tl.cdiv(seq_len - base, length)
    if OVERLAP >= 4:
        wait_for_previous(OVERLAP)
    place = (request * tl.num_programs(0) + head) * num_splits
    out = merged_splits(partial_ptr, lse_ptr, place, live, HEAD_DIM, BLOCK_D, BLOCK_S)
    own = head + tl.arange(0, 1)
    this = request * tl.num_programs(0) + own
    store_heads(out[None, :], out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, this, own, this >= 0, HEAD_DIM, 1,
                STATIC, BITS)  # fmt: skip
