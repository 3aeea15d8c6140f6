"""A warp group of Hopper's prompt attention: 64 queries over the key tiles that another warp copies.

The product of queries with the next keys and that of weights with values run while weights are computed. Two
groups take turns to start products, so that one exponentiates while the other multiplies.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ingot.kernels.attention.hopper_work import key_tiles, published
from ingot.kernels.attention.int8_heads import store_channels
from ingot.kernels.attention.score_exponents import LEAST_SCORE, softcapped


@gluon.jit
def attend(
    queries: tl.tuple,
    keys: tl.tuple,
    values: tl.tuple,
    turns: tl.tensor,
    plan: tl.tuple,
    factors: tl.tuple,
    output: tl.tuple,
    heads: tl.tensor,
    WHICH: gl.constexpr,
    STATIC: gl.constexpr,
    BITS: gl.constexpr,
    SHAPE: gl.constexpr,
) -> None:
    """All items of a program, by warp group WHICH, 0 or 1.

    ``turns`` has a barrier per group; ``factors`` are the scale of scores and the window; ``output`` is what
    ``store_channels`` takes.
    """
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    STAGED: gl.constexpr = SHAPE.QUERY_STAGES > 1  # with one stage registers are scarce too
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LAYOUT: gl.constexpr = ROWS if STAGED else SUMS
    out_ptr, out_scale_ptr, out_zero_ptr, q_ptr = output
    count = 0
    items = 0
    taken = 0
    more = True
    while more:
        head, row, left, first, upper = published(plan, taken)
        taken += 1
        more = left > 0
        if upper > 0:
            place = (first, upper, items)
            acc, count = attend_tile(count, place, queries, keys, values, turns, factors, WHICH, SHAPE)
            out = by_rows(acc, queries, items, LAYOUT, WHICH, SHAPE) if STAGED else acc.to(SHAPE.DTYPE)
            items += 1
        else:
            out = gl.zeros([64, HEAD_DIM], SHAPE.DTYPE, LAYOUT)
        if left > 0:
            own = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
            channels = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
            rows = (row + own).to(gl.int64) * heads + head
            store_channels(out, channels, out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, rows, head,
                           own < left, HEAD_DIM, 1, STATIC, BITS)  # fmt: skip


@gluon.jit
def by_rows(
    acc: tl.tensor,
    queries: tl.tuple,
    items: tl.tensor,
    LAYOUT: gl.constexpr,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
) -> tl.tensor:
    """Outputs in the dtype of queries, 16 bytes of a row per thread; the place of the queries is free then.

    The outputs pass through the place of the group's own queries, which no product reads any more.
    """
    tiles, _, empty = queries
    slot = items % SHAPE.QUERY_STAGES
    own = tiles.index(slot * 2 + WHICH)
    own.store(acc.to(SHAPE.DTYPE))
    out = own.load(LAYOUT)
    fence_async_shared()
    mbarrier.arrive(empty.index(slot), count=1)
    return out


@gluon.jit
def attend_tile(
    count: tl.tensor,
    place: tl.tuple,
    queries: tl.tuple,
    keys: tl.tuple,
    values: tl.tuple,
    turns: tl.tensor,
    factors: tl.tuple,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
) -> tl.tensor:
    """Outputs of 64 queries; ``count`` is the number of key tiles before."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    first, upper, items = place
    q_tiles, q_full = queries[0], queries[1]
    slot = items % SHAPE.QUERY_STAGES
    q = q_tiles.index(slot * 2 + WHICH)
    lower, end = key_tiles(first, upper, factors[1], SHAPE)
    own = first + WHICH * 64  # position of the group's first query
    positions = own + gl.arange(0, 64, layout=ROWS)
    top = gl.full([64], LEAST_SCORE, gl.float32, ROWS)
    mbarrier.wait(q_full.index(slot), (items // SHAPE.QUERY_STAGES) & 1)
    scores = start_scores(q, keys, count, SHAPE)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys[2].index(count % SHAPE.STAGES), count=1)
    # From ``begin`` to ``full`` are tiles that all queries of the group see whole.
    begin = lower + 1
    full = gl.maximum(own + 1, 0) // BLOCK_N
    total = gl.zeros([64], gl.float32, ROWS)
    if SHAPE.HAS_WINDOW or full < begin:
        weights, top, total, _ = weigh(scores, top, total, lower, positions, factors, True, SHAPE)
    else:
        weights, top, total, _ = weigh(scores, top, total, lower, positions, factors, False, SHAPE)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, SUMS)
    state = (acc, weights, top, total, count + 1)
    full = gl.maximum(gl.minimum(full, end), begin)
    if SHAPE.HAS_WINDOW:
        inside = gl.cdiv(gl.maximum(own + 64 - factors[1], 0), BLOCK_N)
        inside = gl.minimum(gl.maximum(inside, begin), full)
        state = advance(state, begin, inside, items, q, keys, values, turns, positions, factors, True,
                        WHICH, SHAPE)  # fmt: skip
        begin = inside
    state = advance(state, begin, full, items, q, keys, values, turns, positions, factors, False,
                    WHICH, SHAPE)  # fmt: skip
    state = advance(state, full, end, items, q, keys, values, turns, positions, factors, True,
                    WHICH, SHAPE)  # fmt: skip
    if SHAPE.QUERY_STAGES == 1:
        mbarrier.arrive(queries[2].index(0), count=1)
    acc, weights, top, total, count = state
    acc = start_sums(acc, weights, values, count - 1, SHAPE)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(values[2].index((count - 1) % SHAPE.STAGES), count=1)
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)  # one division per query, not one per channel
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, count


@gluon.jit
def start_scores(q: tl.tensor, keys: tl.tuple, count: tl.tensor, SHAPE: gl.constexpr) -> tl.tensor:
    """Start the product of queries with a tile's keys, once they are there."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    tiles, full, _ = keys
    slot = count % SHAPE.STAGES
    mbarrier.wait(full.index(slot), (count // SHAPE.STAGES) & 1)
    none = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
    return warpgroup_mma(q, tiles.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def start_sums(
    acc: tl.tensor, weights: tl.tensor, values: tl.tuple, count: tl.tensor, SHAPE: gl.constexpr
) -> tl.tensor:
    """Start adding the product of weights with a tile's values, once they are there."""
    tiles, full, _ = values
    slot = count % SHAPE.STAGES
    mbarrier.wait(full.index(slot), (count // SHAPE.STAGES) & 1)
    return warpgroup_mma(weights, tiles.index(slot), acc, is_async=True)


@gluon.jit
def advance(
    state: tl.tuple,
    lower: tl.tensor,
    upper: tl.tensor,
    items: tl.tensor,
    q: tl.tensor,
    keys: tl.tuple,
    values: tl.tuple,
    turns: tl.tensor,
    positions: tl.tensor,
    factors: tl.tuple,
    MASKED: gl.constexpr,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
) -> tl.tensor:
    """Take key tiles ``lower`` to ``upper`` into the running softmax; values are one tile behind."""
    acc, weights, top, total, count = state
    for tile in range(lower, upper):
        mbarrier.wait(turns.index(WHICH), ((count - items) & 1) ^ WHICH)
        scores = start_scores(q, keys, count, SHAPE)
        acc = start_sums(acc, weights, values, count - 1, SHAPE)
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(keys[2].index(count % SHAPE.STAGES), count=1)
        next_weights, top, total, fade = weigh(scores, top, total, tile, positions, factors, MASKED, SHAPE)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(values[2].index((count - 1) % SHAPE.STAGES), count=1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = next_weights
        count += 1
    return acc, weights, top, total, count


@gluon.jit
def weigh(
    scores: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    tile: tl.tensor,
    positions: tl.tensor,
    factors: tl.tuple,
    MASKED: gl.constexpr,
    SHAPE: gl.constexpr,
) -> tl.tensor:
    """Scores to weights, a left operand; the new maximum and sum of weights, and how older sums fade."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.HEAD_DIM, 16])
    CAP: gl.constexpr = SHAPE.CAP
    scale_log2, window = factors
    if CAP > 0.0:
        scores = softcapped(scores * scale_log2, CAP)
    if MASKED:
        tokens = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
        seen = tokens[None, :] <= positions[:, None]
        if SHAPE.HAS_WINDOW:
            seen = seen & (tokens[None, :] > positions[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    if CAP > 0.0:
        new_top = gl.maximum(top, gl.max(scores, axis=1))
        wide = gl.exp2(scores - new_top[:, None])
    else:
        new_top = gl.maximum(top, gl.max(scores, axis=1) * scale_log2)
        wide = gl.exp2(scores * scale_log2 - new_top[:, None])
    fade = gl.exp2(top - new_top)
    total = total * fade + gl.sum(wide, axis=1)
    weights = gl.convert_layout(wide.to(SHAPE.DTYPE), gl.DotOperandLayout(0, LAYOUT, 2))
    return weights, new_top, total, fade
