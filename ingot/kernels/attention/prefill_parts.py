"""Prefill attention where several programs share a tile's keys: the last to arrive merges the parts.

out, last = meet_parts(out, lse, partial_ptr, lse_ptr, arrivals_ptr, entry, part, parts, wanted, ...)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.attention.paged_merge import arrive_last
from ingot.kernels.attention.score_exponents import LEAST_SCORE


@triton.jit
def part_bounds(
    lower: tl.tensor,
    full: tl.tensor,
    upper: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """The same bounds of one of ``parts`` runs of key tiles, equally long except for the last ones."""
    length = tl.cdiv(tl.cdiv(upper - lower, parts), BLOCK_N) * BLOCK_N
    begin = lower + part * length
    end = tl.minimum(begin + length, upper)
    return begin, tl.minimum(tl.maximum(full, begin), end), end


@triton.jit
def meet_parts(
    out: tl.tensor,
    lse: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    entry: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    wanted: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Store a part's outputs [BLOCK_M, BLOCK_D] and their sums of exponentials; the last part to arrive gets
    the whole tile's outputs, and true. Queries that see no key of a part have LEAST_SCORE as their sum.
    """
    head, heads = tl.program_id(0), tl.num_programs(0)
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    places = (rows * HEAD_DIM)[:, None] + cols[None, :]
    mask = wanted[:, None] & (cols < HEAD_DIM)[None, :]
    own = entry * heads + head
    tl.store(partial_ptr + own * BLOCK_M * HEAD_DIM + places, out, mask=mask)
    tl.store(lse_ptr + own * BLOCK_M + rows, lse, mask=wanted)
    first = (entry - part) * heads + head
    last = arrive_last(arrivals_ptr + first, parts)
    if last:
        out = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        top = tl.full([BLOCK_M], LEAST_SCORE, dtype=tl.float32)
        for other in range(parts):
            place = first + other * heads
            lse = tl.load(
                lse_ptr + place * BLOCK_M + rows, mask=wanted, other=LEAST_SCORE, cache_modifier=".cg"
            )
            partial = tl.load(
                partial_ptr + place * BLOCK_M * HEAD_DIM + places, mask=mask, other=0.0, cache_modifier=".cg"
            )
            new_top = tl.maximum(top, lse)
            fade, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
            out = out * fade[:, None] + partial * weight[:, None]
            total = total * fade + weight
            top = new_top
        out = out / total[:, None]
    return out, last
