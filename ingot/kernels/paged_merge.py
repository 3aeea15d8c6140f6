"""The second half of decode attention: the splits of one head become one output.

Owns the weighing of partial outputs by their sums of exponentials. Knows no keys.

    paged_attention_merge_kernel[(num_heads, batch)](partial, lse, seq_lens, out, ...)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.overlap import start_next, wait_for_previous
from ingot.kernels.paged_tile import split_bounds

LEAST_SCORE = tl.constexpr(-1.0e38)  # finite, so that exp2(masked - running maximum) is 0 and never NaN


@triton.jit
def paged_attention_merge_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Weigh the splits of one head by their sums of exponentials; zeros where there was no key."""
    start_next(OVERLAP)
    if OVERLAP < 4:
        wait_for_previous(OVERLAP)
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    _, base, length = split_bounds(seq_len, window, MAX_SPLITS, MIN_TOKENS, BLOCK_N, HAS_WINDOW)
    splits = tl.arange(0, BLOCK_S)
    live = splits * length < seq_len - base
    if OVERLAP >= 4:
        wait_for_previous(OVERLAP)
    cols = tl.arange(0, BLOCK_D)
    in_head = cols < HEAD_DIM
    place = (request * tl.num_programs(0) + head) * num_splits + splits
    lse = tl.load(lse_ptr + place, mask=live, other=float("-inf"))
    weights = tl.exp2(lse - tl.maximum(tl.max(lse, axis=0), LEAST_SCORE))
    partial = tl.load(
        partial_ptr + (place * HEAD_DIM)[:, None] + cols[None, :],
        mask=live[:, None] & in_head[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    target = out_ptr + (request * tl.num_programs(0) + head) * HEAD_DIM + cols
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=in_head)
