"""The matrix product of a decode step with weights of 8 or 4 bits: x · Wᵀ, unpacked in registers.

Owns the loop over chunks of packed columns (the layout is stored_weight.py's). A group's scale multiplies the
sums of its columns in fp32; its zero is taken from the numbers, exactly. Knows no epilogue.

    acc = packed_tile(x_ptr, ...)  # [BLOCK_N, BLOCK_T] fp32
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.overlap import wait_for_previous
from ingot.kernels.weight.narrow_numbers import unpack
from ingot.kernels.weight.word_places import word_places


@triton.jit
def _of_group(
    ptr: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """The number of each row for the group of a column; of the last group past the end."""
    return tl.load(ptr + tl.minimum(column // GROUP, (K - 1) // GROUP) * stride + rows)


@triton.jit
def _columns(
    places: tl.tensor,
    real: tl.tensor,
    cols: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """A part's columns of the rows of x, from ``start`` on."""
    if MASKED:
        x = tl.load(places + start, mask=real & (start + cols < K)[None, :], other=0.0)
    else:
        x = tl.load(places + start, mask=real, other=0.0)
    return x


@triton.jit
def _of_parts(
    ptr: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    FOUR: tl.constexpr,
    SINGLE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """The numbers of each row for the groups of the four parts (two: again) of a chunk from ``column`` on."""
    n0 = _of_group(ptr, stride, rows, column, K, GROUP)
    n1 = n0
    if SINGLE:
        n1 = _of_group(ptr, stride, rows, column + PART, K, GROUP)
    n2, n3 = n0, n1
    if FOUR and not WHOLE:
        n2 = _of_group(ptr, stride, rows, column + 2 * PART, K, GROUP)
        n3 = n2
        if SINGLE:
            n3 = _of_group(ptr, stride, rows, column + 3 * PART, K, GROUP)
    return n0, n1, n2, n3


@triton.jit
def _parts(
    x_rows: tl.tensor,
    real: tl.tensor,
    cols: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    PART: tl.constexpr,
    FOUR: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """The columns of x that a chunk's four parts (two: again) multiply."""
    x0 = _columns(x_rows, real, cols, column, K, MASKED)
    x1 = _columns(x_rows, real, cols, column + PART, K, MASKED)
    x2, x3 = x0, x1
    if FOUR:
        x2 = _columns(x_rows, real, cols, column + 2 * PART, K, MASKED)
        x3 = _columns(x_rows, real, cols, column + 3 * PART, K, MASKED)
    return x0, x1, x2, x3


@triton.jit
def _add_pair(
    acc: tl.tensor,
    w0: tl.tensor,
    x0: tl.tensor,
    w1: tl.tensor,
    x1: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    SINGLE: tl.constexpr,
) -> tl.tensor:
    """acc + the products of two parts, scaled each or (not SINGLE) together."""
    sums = tl.dot(w0, tl.trans(x0), input_precision="ieee")
    if SINGLE:
        acc += sums * s0.to(tl.float32)[:, None]
        acc += tl.dot(w1, tl.trans(x1), input_precision="ieee") * s1.to(tl.float32)[:, None]
    else:
        acc += tl.dot(w1, tl.trans(x1), sums, input_precision="ieee") * s0.to(tl.float32)[:, None]
    return acc


@triton.jit
def packed_tile(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    scale_ptr: tl.tensor,
    scale_stride: tl.tensor,
    zero_ptr: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    first: tl.tensor,
    steps: tl.tensor,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Rows ``rows`` of the weight times each row of x, over ``steps`` chunks of BLOCK_K columns from chunk
    ``first``: [BLOCK_N, BLOCK_T] fp32, scaled. Rows that are not ``live`` (None: all are) are not read.

    The scales of a chunk are in registers a step ahead, its zeros are not. PREFETCH 1
    pipelines the weights alone, from before the wait on, any other the rows of x too, after it.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    FOUR: tl.constexpr = BITS == 4
    PART: tl.constexpr = BLOCK_K * BITS // 16
    MASKED: tl.constexpr = K % BLOCK_K != 0
    ZEROS: tl.constexpr = zero_ptr is not None
    # Parts of a chunk whose columns share a group: none, two by two, or all.
    SINGLE: tl.constexpr = GROUP > 0 and GROUP < 2 * PART
    WHOLE: tl.constexpr = GROUP == 0 or GROUP >= BLOCK_K
    token, cols = tl.arange(0, BLOCK_T), tl.arange(0, PART)
    real = (token < tokens)[:, None]
    x_rows = x_ptr + token[:, None] * x_stride + cols[None, :]
    places = word_places(weight_ptr, weight_stride, rows, cols)
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    if PREFETCH != 1:
        wait_for_previous(OVERLAP)
    column = first * BLOCK_K
    middle = tl.full([BLOCK_N], 1 << (BITS - 1), dtype=tl.uint8)
    z0, z1, z2, z3 = middle, middle, middle, middle
    if GROUP > 0:
        s0, s1, s2, s3 = _of_parts(scale_ptr, scale_stride, rows, column, K, GROUP, PART, FOUR, SINGLE, WHOLE)
    elif ZEROS:
        z0 = tl.load(zero_ptr + rows)
        z1, z2, z3 = z0, z0, z0
    for step in tl.range(0, steps):
        column = (first + step) * BLOCK_K
        # Not a step ahead like the scales: numbers that pass through the loop would keep the words from being
        # unpacked in the layout of the product, and they would go through shared memory once more.
        if ZEROS and GROUP > 0:
            z0, z1, z2, z3 = _of_parts(zero_ptr, scale_stride, rows, column, K, GROUP, PART, FOUR, SINGLE,
                                       WHOLE)  # fmt: skip
        if live is not None:
            w = tl.load(places + (first + step) * (16 * PART), mask=live[:, None], other=0,
                        eviction_policy="evict_first")  # fmt: skip
        else:
            w = tl.load(places + (first + step) * (16 * PART), eviction_policy="evict_first")
        if PREFETCH == 1:  # two branches that load the same: matrix_product.py says why
            if step == 0:
                wait_for_previous(OVERLAP)
                x0, x1, x2, x3 = _parts(x_rows, real, cols, column, K, PART, FOUR, MASKED)
            else:
                x0, x1, x2, x3 = _parts(x_rows, real, cols, column, K, PART, FOUR, MASKED)
        else:
            x0, x1, x2, x3 = _parts(x_rows, real, cols, column, K, PART, FOUR, MASKED)
        if not SINGLE:
            z1, z3 = z0, z2
        if WHOLE:
            z2, z3 = z0, z0
        w0, w1 = unpack(w, z0, 0, BITS, DTYPE, ASM), unpack(w, z1, 1, BITS, DTYPE, ASM)
        if FOUR:
            w2, w3 = unpack(w, z2, 2, BITS, DTYPE, ASM), unpack(w, z3, 3, BITS, DTYPE, ASM)
        if GROUP == 0:
            acc = tl.dot(w0, tl.trans(x0), acc, input_precision="ieee")
            acc = tl.dot(w1, tl.trans(x1), acc, input_precision="ieee")
            if FOUR:
                acc = tl.dot(w2, tl.trans(x2), acc, input_precision="ieee")
                acc = tl.dot(w3, tl.trans(x3), acc, input_precision="ieee")
        else:
            if FOUR and WHOLE:
                sums = tl.dot(w0, tl.trans(x0), input_precision="ieee")
                sums = tl.dot(w1, tl.trans(x1), sums, input_precision="ieee")
                sums = tl.dot(w2, tl.trans(x2), sums, input_precision="ieee")
                sums = tl.dot(w3, tl.trans(x3), sums, input_precision="ieee")
                acc += sums * s0.to(tl.float32)[:, None]
            else:
                acc = _add_pair(acc, w0, x0, w1, x1, s0, s1, SINGLE)
                if FOUR:
                    acc = _add_pair(acc, w2, x2, w3, x3, s2, s3, SINGLE)
            ahead = column + BLOCK_K
            s0, s1, s2, s3 = _of_parts(scale_ptr, scale_stride, rows, ahead, K, GROUP, PART, FOUR, SINGLE,
                                       WHOLE)  # fmt: skip
    if GROUP == 0:
        acc *= tl.load(scale_ptr + rows).to(tl.float32)[:, None]
    return acc
