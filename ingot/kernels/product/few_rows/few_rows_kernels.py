"""The kernels of products of few rows: one per epilogue, with the inner loop as a constant.

small_linear.py, small_gate_up.py, small_qkv.py and small_int8.py launch them and say what they compute;
resolved_launch.py chooses tiles.

    few_linear_kernel[launch.grid](rows, weight, out, N, launch.share, launch.splits, launch.loop)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.launch_overlap import start_next
from ingot.kernels.product.few_rows.fragment_loop import fragment_tile, row_order
from ingot.kernels.product.few_rows.fragment_step_loop import fragment_step_tile
from ingot.kernels.product.few_rows.int8_fragment_loop import int8_fragment_tile
from ingot.kernels.product.few_rows.matrix_loop import matrix_tile
from ingot.kernels.product.few_rows.packed_loop import packed_tile
from ingot.kernels.product.few_rows.product_epilogues import (
    channels,
    store_activated,
    store_heads,
    store_sums,
)
from ingot.kernels.product.few_rows.vector_loop import gate_up_rows, vector_gate_up, vector_heads, vector_sums
from ingot.kernels.product.product_arguments import Heads, InputRows, Sums, Weight


@triton.jit
def _start_early(LOOP: constexpr) -> None:
    """With OVERLAP 2, or if no program needs shared memory, the next kernel may start at once."""
    if LOOP.OVERLAP == 2 or LOOP.FRAGMENTS > 0:
        start_next(LOOP.OVERLAP)


@triton.jit
def _start_late(LOOP: constexpr) -> None:
    if LOOP.OVERLAP == 4 and LOOP.FRAGMENTS == 0:
        start_next(LOOP.OVERLAP)


@triton.jit
def _lanes(COUNT: constexpr, LOOP: constexpr) -> tensor:
    """The row of a tile that each of its COUNT sums belongs to."""
    return row_order(COUNT) if LOOP.KIND == "fragments" else tl.arange(0, COUNT)


@triton.jit
def _sums(
    x: InputRows,
    weight: Weight,
    rows: tensor,
    live: tensor,
    start: tensor,
    block: tensor,
    first: tensor,
    end: tensor,
    RUN: constexpr,
    GAP: constexpr,
    N: constexpr,
    LOOP: constexpr,
    SPLITS: constexpr = 1,
) -> tensor:
    """Rows of the weight times each row of x, over steps ``first`` to ``end``: [BLOCK_N, BLOCK_T].

    These are the ``live`` ones of ``rows`` (None: all); of loops straight into registers RUN neighbours from
    ``start`` on (``block`` of 16), then as many GAP rows further, of N.
    """
    if LOOP.KIND == "matrix":
        acc = matrix_tile(x, weight, rows, live, first, end - first, LOOP)
    elif LOOP.KIND == "packed":
        acc = packed_tile(x, weight, rows, live, first, end - first, LOOP)
    elif LOOP.KIND == "fragments" and LOOP.BITS == 8 and LOOP.FRAGMENTS == 1:
        acc = fragment_step_tile(x, weight, block, first, end, (RUN // 16, GAP // 16, N // 16 - 1), LOOP)
    elif LOOP.KIND == "fragments":
        EVEN: constexpr = LOOP.STEPS % (SPLITS * LOOP.WARPS) == 0
        COUNT: constexpr = LOOP.STEPS // (SPLITS * LOOP.WARPS) if EVEN else 0
        WHOLE: constexpr = (GAP if GAP > 0 else N) % RUN == 0
        acc = fragment_tile(
            x, weight, block, first, end, (RUN // 16, GAP // 16, N // 16 - 1, WHOLE), COUNT, LOOP
        )
    else:
        acc = int8_fragment_tile(x, weight, start, first, end, N, RUN, GAP, LOOP)
    return acc


@triton.jit
def few_linear_kernel(
    x: tensor,
    weight: tensor,
    out: tensor,
    N: constexpr,
    SHARE: constexpr,
    SPLITS: constexpr,
    LOOP: constexpr,
    ACTIVATION: constexpr,
) -> None:
    """SHARE outputs of every row, at most BLOCK_N, or with SPLITS a part of their sums; int32 sums, if x is
    in 8 bits without scales.
    """
    x, weight, out = InputRows(*x), Weight(*weight), Sums(*out)
    _start_early(LOOP)
    if LOOP.KIND == "vectors":
        vector_sums(x, weight, out, N, LOOP, ACTIVATION)
    else:
        BLOCK_N: constexpr = LOOP.BLOCK_N
        tile, split = tl.program_id(0), tl.program_id(1)
        start = tile * SHARE
        lane = tl.arange(0, BLOCK_N)
        rows = tl.minimum(start + lane, N - 1)
        live = None if SHARE == BLOCK_N else lane < SHARE
        first, end = split * LOOP.STEPS // SPLITS, (split + 1) * LOOP.STEPS // SPLITS
        acc = _sums(
            x, weight, rows, live, start, tile * (BLOCK_N // 16), first, end, BLOCK_N, 0, N, LOOP, SPLITS
        )
        _start_late(LOOP)
        last = N if LOOP.FRAGMENTS > 0 else tl.minimum(start + SHARE, N)
        lanes = _lanes(BLOCK_N, LOOP)
        store_sums(acc, start + lanes, last, split, out, x.tokens, N, LOOP.BLOCK_T, ACTIVATION)


@triton.jit
def few_gate_up_kernel(
    x: tensor, weight: tensor, y_ptr: tensor, INNER: constexpr, SHARE: constexpr, LOOP: constexpr
) -> None:
    """SHARE outputs of every row, at most BLOCK_N / 2."""
    x, weight = InputRows(*x), Weight(*weight)
    _start_early(LOOP)
    if LOOP.KIND == "vectors":
        vector_gate_up(x, weight, y_ptr, INNER, LOOP)
    else:
        PAIRS: constexpr = LOOP.BLOCK_N // 2
        tile = tl.program_id(0)
        start = tile * SHARE
        rows = gate_up_rows(start, INNER, LOOP.BLOCK_N)
        live = None if SHARE == PAIRS else tl.arange(0, LOOP.BLOCK_N) % PAIRS < SHARE
        acc = _sums(x, weight, rows, live, start, tile * (PAIRS // 16), 0, LOOP.STEPS, PAIRS, INNER,
                    2 * INNER, LOOP)  # fmt: skip
        _start_late(LOOP)
        last = INNER if LOOP.FRAGMENTS > 0 else tl.minimum(start + SHARE, INNER)
        store_activated(acc, start + _lanes(PAIRS, LOOP), last, y_ptr, x.tokens, INNER, PAIRS, LOOP.BLOCK_T)


@triton.jit
def few_qkv_kernel(
    x: tensor, weight: tensor, out: tensor, SHAPE: constexpr, SHARE: constexpr, LOOP: constexpr
) -> None:
    """SHARE channel pairs of a head, at most BLOCK_N / 2, of every row, so that whole vectors are stored."""
    x, weight, out = InputRows(*x), Weight(*weight), Heads(*out)
    _start_early(LOOP)
    if LOOP.KIND == "vectors":
        vector_heads(x, weight, out, SHAPE, LOOP)
    else:
        PAIRS: constexpr = LOOP.BLOCK_N // 2
        HEAD_DIM: constexpr = SHAPE.HEAD_DIM
        IN_HEAD: constexpr = HEAD_DIM // 2
        N: constexpr = (SHAPE.HEADS + 2 * SHAPE.KV_HEADS) * HEAD_DIM
        CHUNKS: constexpr = (IN_HEAD + SHARE - 1) // SHARE
        tile = tl.program_id(0)
        head, start = tile // CHUNKS, tile % CHUNKS * SHARE
        lane = _lanes(LOOP.BLOCK_N, LOOP)
        firsts, seconds = channels(tl.minimum(start + lane % PAIRS, IN_HEAD - 1), SHAPE)
        rows = head * HEAD_DIM + tl.where(lane < PAIRS, firsts, seconds)
        live = None if SHARE == PAIRS else lane % PAIRS < SHARE
        own = head * HEAD_DIM + start
        acc = _sums(x, weight, rows, live, own, own // 16, 0, LOOP.STEPS, PAIRS, IN_HEAD, N, LOOP)
        _start_late(LOOP)
        if out.bias is not None:
            acc += tl.load(out.bias + rows).to(tl.float32)[:, None]
        last = IN_HEAD if LOOP.FRAGMENTS > 0 else tl.minimum(start + SHARE, IN_HEAD)
        store_heads(acc, head, start + _lanes(PAIRS, LOOP), last, out, x.tokens, SHAPE, PAIRS, LOOP.BLOCK_T)
