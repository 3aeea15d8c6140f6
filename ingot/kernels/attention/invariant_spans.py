"""How the spans of batch-invariant attention are summed, merged and divided.

acc_all, total_all, top_all = meet(acc_all, total_all, top_all, acc, total, top)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.attention.score_exponents import LEAST_SCORE

_ONE_BITS = tl.constexpr(0x3F800000)
_UNIT = tl.constexpr(2.0**-23)


@triton.jit
def sum_rows(p: tl.tensor) -> tl.tensor:
    """Row sums of values from 0 to 1, each rounded to 2^-23: sums of integers, the same in any order."""
    return tl.sum((p + 1.0).to(tl.int32, bitcast=True) - _ONE_BITS, axis=1).to(tl.float32) * _UNIT


@triton.jit
def meet(
    acc_all: tl.tensor,
    total_all: tl.tensor,
    top_all: tl.tensor,
    acc: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
) -> tl.tensor:
    """Merge the next span into those before it: weighted sum, sum of weights, highest score."""
    new_top = tl.maximum(top_all, top)
    keep, add = tl.exp2(top_all - new_top), tl.exp2(top - new_top)
    return acc_all * keep[:, None] + acc * add[:, None], total_all * keep + total * add, new_top


@triton.jit
def finish(acc: tl.tensor, total: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Weighted sums over sums of weights; +0 where there was no key."""
    inverse = tl.div_rn(1.0, tl.where(total == 0.0, 1.0, total))
    return (acc * inverse[:, None] + 0.0).to(dtype)


@triton.jit(do_not_specialize=["window", "num_spans"])
def invariant_meet_kernel(
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    window: tl.tensor,
    num_spans: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Merge the spans of one head of one decoding token, in ascending order."""
    request = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    head = request * tl.num_programs(0) + tl.program_id(0)
    one = tl.arange(0, 1)
    cols = tl.arange(0, BLOCK_D)
    in_head = (cols < HEAD_DIM)[None, :]
    acc = tl.zeros([1, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    top = tl.full([1], LEAST_SCORE, dtype=tl.float32)
    first = seq_len * 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // SPAN
    for span in tl.range(first, tl.cdiv(seq_len, SPAN), num_stages=STAGES):
        place = head * num_spans + span
        part = tl.load(partial_ptr + place * HEAD_DIM + cols[None, :], mask=in_head, other=0.0)
        part_total = tl.load(stats_ptr + place * 2 + one)
        part_top = tl.load(stats_ptr + place * 2 + 1 + one)
        acc, total, top = meet(acc, total, top, part, part_total, part_top)
    out = finish(acc, total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * HEAD_DIM + cols[None, :], out, mask=in_head)
