"""The matrix product of a decode step for 2 to 64 rows: x · Wᵀ with the weight as the left operand.

The loop streams a tile of the weight through shared memory, several steps ahead and already while the
previous kernel runs. Rows and weight are both floats, both int8 or both e4m3; the rows come normalised.

    acc = matrix_tile(x, weight, rows, live, first, steps, LOOP)  # [BLOCK_N, BLOCK_T] fp32
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.launch_overlap import LINE_BYTES, prefetch_lines, wait_for_previous
from ingot.kernels.product.product_arguments import InputRows, Weight


@triton.jit
def _weights(places: tensor, columns: tensor, live: tensor, K: constexpr, MASKED: constexpr) -> tensor:
    """A tile of the weight, streamed past the caches; zeros from column K on and in dead rows."""
    if MASKED:
        inside = (columns < K)[None, :]
        if live is not None:
            inside = inside & live[:, None]
        return tl.load(places, mask=inside, other=0.0, eviction_policy="evict_first")
    if live is not None:
        return tl.load(places, mask=live[:, None], other=0.0, eviction_policy="evict_first")
    return tl.load(places, eviction_policy="evict_first")


@triton.jit
def _row_scales(x: InputRows, token: tensor, group: tensor, GROUPS: constexpr) -> tensor:
    """Scales of the rows of x, or of one of their GROUPS groups, at most the last; without a stride all rows
    share a group's, which is read once.
    """
    if x.scales is None:
        scales = tl.zeros(token.shape, dtype=tl.float32)
    elif x.scale_stride is None:
        scales = tl.full(token.shape, tl.load(x.scales + tl.minimum(group, GROUPS - 1)), dtype=tl.float32)
    else:
        places = x.scales + token * x.scale_stride + tl.minimum(group, GROUPS - 1)
        scales = tl.load(places, mask=token < x.tokens, other=0.0)
    return scales


@triton.jit
def _block_scales(weight: Weight, rows: tensor, group: tensor, GROUPS: constexpr) -> tensor:
    """Scales of the blocks of 128 columns that rows of the weight have at a group, at most the last."""
    return tl.load(weight.scales + rows // 128 * weight.scale_stride + tl.minimum(group, GROUPS - 1))


@triton.jit
def _add(acc: tensor, w: tensor, x: tensor, scales: tensor, blocks: tensor, GROUPED: constexpr) -> tensor:
    """acc + w · xᵀ; GROUPED: the product times the rows' scales, and of a weight in blocks those of its
    ``blocks``. Tensor cores keep few bits of sums of e4m3, so those of each step join fp32 sums.
    """
    if x.dtype == tl.float8e4nv:
        product = tl.dot(w, tl.trans(x), max_num_imprecise_acc=x.shape[1])
        if blocks is not None:
            product *= blocks[:, None]
        acc += product * scales[None, :] if GROUPED else product
    elif GROUPED:
        acc += tl.dot(w, tl.trans(x), out_dtype=tl.int32).to(tl.float32) * scales[None, :]
    elif x.dtype == tl.int8:
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
    else:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit
def matrix_tile(
    x: InputRows, weight: Weight, rows: tensor, live: tensor, first: tensor, steps: tensor, LOOP: constexpr
) -> tensor:
    """Rows ``rows`` of the weight times each row of x, over ``steps`` steps of BLOCK_K columns from step
    ``first``: [BLOCK_N, BLOCK_T] fp32. Rows that are not ``live`` (None: all are) are not read.

    Values of int8 are multiplied exactly; without scales of x the sums stay int32. If GROUP columns of x
    share a scale, a step is such a group, and BLOCK_K is at least as wide.

    With PREFETCH 1 and 2 only the weight's loads are pipelined: the compiler starts them ahead of the loop,
    before the wait for the previous kernel. The rows of x come from L2, with 2 one step ahead in registers.
    With PREFETCH 0 both are pipelined, after the wait; with more than 2 so many columns of the weight are
    prefetched into L2 before it.
    """
    K: constexpr = LOOP.K
    GROUP: constexpr = LOOP.GROUP
    BLOCK_T: constexpr = LOOP.BLOCK_T
    BLOCK_N: constexpr = LOOP.BLOCK_N
    BLOCK_K: constexpr = LOOP.BLOCK_K
    PREFETCH: constexpr = LOOP.PREFETCH
    OVERLAP: constexpr = LOOP.OVERLAP
    dtype: constexpr = x.ptr.dtype.element_ty
    LINE: constexpr = LINE_BYTES // (dtype.primitive_bitwidth // 8)
    INT8: constexpr = dtype == tl.int8
    GROUPED: constexpr = dtype.primitive_bitwidth == 8 and GROUP > 0
    SPAN: constexpr = GROUP if GROUPED else BLOCK_K
    GROUPS: constexpr = K // GROUP if GROUPED else 1
    MASKED: constexpr = K % BLOCK_K != 0 or SPAN < BLOCK_K
    token = tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_K)
    real = (token < x.tokens)[:, None]
    if SPAN < BLOCK_K:
        real = real & (cols < SPAN)[None, :]
    columns = x.ptr + token[:, None] * x.stride + cols[None, :]
    places = weight.ptr + (rows.to(tl.int64) * weight.stride)[:, None] + cols[None, :]
    IN_BLOCKS: constexpr = weight.scale_stride is not None
    blocks = None
    if IN_BLOCKS:
        blocks = _block_scales(weight, rows, first, GROUPS)
    elif x.scales is not None:
        scales = tl.load(weight.scales + rows)[:, None]  # constants: loaded before the wait
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.int32 if INT8 and not GROUPED else tl.float32)
    x_scales = tl.zeros([BLOCK_T], dtype=tl.float32)
    row = tl.zeros([BLOCK_T, BLOCK_K], dtype=dtype)
    if PREFETCH == 0 or PREFETCH > 2:
        if PREFETCH > 2 and OVERLAP > 1:
            ahead = first * SPAN + tl.arange(0, PREFETCH // LINE) * LINE
            wanted = (ahead < K)[None, :] & (rows >= 0)[:, None]
            if live is not None:
                wanted = wanted & live[:, None]
            prefetch_lines(weight.ptr + (rows.to(tl.int64) * weight.stride)[:, None] + ahead[None, :], wanted)
        wait_for_previous(OVERLAP)
        x_scales = _row_scales(x, token, first * GROUPED, GROUPS)
    for step in tl.range(0, steps):
        here = (first + step) * SPAN
        there = here + SPAN
        now, then = real, real & (step + 1 < steps)
        if K % BLOCK_K != 0:
            now, then = now & (here + cols < K)[None, :], then & (there + cols < K)[None, :]
        if SPAN < BLOCK_K:
            w = _weights(places + here, cols, live, SPAN, MASKED)
        else:
            w = _weights(places + here, here + cols, live, K, MASKED)
        # Two branches with the same loads: a load in a branch is not pipelined, so it is not issued before
        # the wait, and it keeps its layout.
        if PREFETCH == 2:
            if step == 0:
                wait_for_previous(OVERLAP)
                row = tl.load(columns + here, mask=now, other=0.0)
                x_scales = _row_scales(x, token, first * GROUPED, GROUPS)
                ahead = tl.load(columns + there, mask=then, other=0.0)
            else:
                row = tl.load(
                    columns + here, mask=now & (step < 0), other=row
                )  # keeps the layout, loads nothing
                ahead = tl.load(columns + there, mask=then, other=0.0)
            acc = _add(acc, w, row, x_scales, blocks, GROUPED)
            row = ahead
        elif PREFETCH == 1:
            if step == 0:
                wait_for_previous(OVERLAP)
                row = tl.load(columns + here, mask=now, other=0.0)
                x_scales = _row_scales(x, token, first * GROUPED, GROUPS)
            else:
                row = tl.load(columns + here, mask=now, other=0.0)
            acc = _add(acc, w, row, x_scales, blocks, GROUPED)
        else:
            row = tl.load(columns + here, mask=now, other=0.0)
            acc = _add(acc, w, row, x_scales, blocks, GROUPED)
        if GROUPED:
            x_scales = _row_scales(x, token, first + step + 1, GROUPS)
        if IN_BLOCKS:
            blocks = _block_scales(weight, rows, first + step + 1, GROUPS)
    if x.scales is not None and not IN_BLOCKS:
        if not GROUPED:
            acc = acc.to(tl.float32) * x_scales[None, :]
        acc *= scales
    return acc
