"""The matrix product of a decode step with weights of 4 bits: x · Wᵀ, unpacked in registers.

Owns the loop over chunks of packed columns (the layout is stored_weight.py's). A group's scale multiplies the sums of its columns in fp32; its zero is
taken from the numbers, exactly. Knows no epilogue.

    acc = packed_tile(x_ptr, ...)  # [BLOCK_N, BLOCK_T] fp32
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.narrow_numbers import nibbles
from ingot.kernels.overlap import wait_for_previous

@triton.jit
def _of_group(ptr: tl.tensor, stride: tl.tensor, rows: tl.tensor, column: tl.tensor, K: tl.constexpr,
              GROUP: tl.constexpr) -> tl.tensor:  # fmt: skip
    """A group's number for each row; of the last group past the end."""
    return tl.load(ptr + tl.minimum(column // GROUP, (K - 1) // GROUP) * stride + rows)


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
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Rows ``rows`` of the weight times each row of x, over ``steps`` chunks of BLOCK_K columns from chunk
    ``first``: [BLOCK_N, BLOCK_T] fp32; times the scale where groups have one (GROUP > 0).

    The scales of a chunk are in registers a step ahead. PREFETCH as in ``matrix_tile``: 1 pipelines the
    weights alone, from before the wait on, 0 the rows of x too.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PART: tl.constexpr = BLOCK_K // 4
    MASKED: tl.constexpr = K % BLOCK_K != 0
    SLOTS: tl.constexpr = 0 if GROUP == 0 else max(BLOCK_K // max(GROUP, PART), 1)
    token, cols = tl.arange(0, BLOCK_T), tl.arange(0, PART)
    real = (token < tokens)[:, None]
    columns = x_ptr + token[:, None] * x_stride + cols[None, :]
    places = weight_ptr + (rows.to(tl.int64) * weight_stride)[:, None] + cols[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    if PREFETCH == 0:
        wait_for_previous(OVERLAP)
    eight = tl.full([BLOCK_N], 8, dtype=tl.uint8)
    z0, z1, z2, z3 = eight, eight, eight, eight
    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
    if zero_ptr is not None and GROUP == 0:
        z0 = tl.load(zero_ptr + rows)
        z1, z2, z3 = z0, z0, z0
    column = first * BLOCK_K
    if SLOTS > 0:
        s0 = _of_group(scale_ptr, scale_stride, rows, column, K, GROUP)
        if zero_ptr is not None:
            z0 = _of_group(zero_ptr, scale_stride, rows, column, K, GROUP)
    if SLOTS > 1:
        s2 = _of_group(scale_ptr, scale_stride, rows, column + 2 * PART, K, GROUP)
        if zero_ptr is not None:
            z2 = _of_group(zero_ptr, scale_stride, rows, column + 2 * PART, K, GROUP)
    if SLOTS > 2:
        s1 = _of_group(scale_ptr, scale_stride, rows, column + PART, K, GROUP)
        s3 = _of_group(scale_ptr, scale_stride, rows, column + 3 * PART, K, GROUP)
        if zero_ptr is not None:
            z1 = _of_group(zero_ptr, scale_stride, rows, column + PART, K, GROUP)
            z3 = _of_group(zero_ptr, scale_stride, rows, column + 3 * PART, K, GROUP)
    for step in tl.range(0, steps):
        column = (first + step) * BLOCK_K
        if live is not None:
            w = tl.load(places + (first + step) * PART, mask=live[:, None], other=0,
                        eviction_policy="evict_first")  # fmt: skip
        else:
            w = tl.load(places + (first + step) * PART, eviction_policy="evict_first")
        in0, in1, in2, in3 = real, real, real, real
        if MASKED:
            in0 = real & (column + cols < K)[None, :]
            in1 = real & (column + PART + cols < K)[None, :]
            in2 = real & (column + 2 * PART + cols < K)[None, :]
            in3 = real & (column + 3 * PART + cols < K)[None, :]
        if PREFETCH == 1:  # two branches that load the same: matrix_product.py says why
            if step == 0:
                wait_for_previous(OVERLAP)
                x0 = tl.load(columns + column, mask=in0, other=0.0)
                x1 = tl.load(columns + column + PART, mask=in1, other=0.0)
                x2 = tl.load(columns + column + 2 * PART, mask=in2, other=0.0)
                x3 = tl.load(columns + column + 3 * PART, mask=in3, other=0.0)
            else:
                x0 = tl.load(columns + column, mask=in0, other=0.0)
                x1 = tl.load(columns + column + PART, mask=in1, other=0.0)
                x2 = tl.load(columns + column + 2 * PART, mask=in2, other=0.0)
                x3 = tl.load(columns + column + 3 * PART, mask=in3, other=0.0)
        else:
            x0 = tl.load(columns + column, mask=in0, other=0.0)
            x1 = tl.load(columns + column + PART, mask=in1, other=0.0)
            x2 = tl.load(columns + column + 2 * PART, mask=in2, other=0.0)
            x3 = tl.load(columns + column + 3 * PART, mask=in3, other=0.0)
        if SLOTS < 3:
            z1, z3 = z0, z2
        if SLOTS < 2:
            z2, z3 = z0, z0
        w0 = nibbles(w, z0, 0, DTYPE, ASM)
        w1 = nibbles(w, z1, 1, DTYPE, ASM)
        w2 = nibbles(w, z2, 2, DTYPE, ASM)
        w3 = nibbles(w, z3, 3, DTYPE, ASM)
        if SLOTS == 0:
            acc = tl.dot(w0, tl.trans(x0), acc, input_precision="ieee")
            acc = tl.dot(w1, tl.trans(x1), acc, input_precision="ieee")
            acc = tl.dot(w2, tl.trans(x2), acc, input_precision="ieee")
            acc = tl.dot(w3, tl.trans(x3), acc, input_precision="ieee")
        else:
            part = tl.dot(w0, tl.trans(x0), input_precision="ieee")
            if SLOTS > 2:
                acc += part * s0.to(tl.float32)[:, None]
                part = tl.dot(w1, tl.trans(x1), input_precision="ieee")
                acc += part * s1.to(tl.float32)[:, None]
            else:
                part = tl.dot(w1, tl.trans(x1), part, input_precision="ieee")
            if SLOTS == 2:
                acc += part * s0.to(tl.float32)[:, None]
            if SLOTS > 1:
                part = tl.dot(w2, tl.trans(x2), input_precision="ieee")
            else:
                part = tl.dot(w2, tl.trans(x2), part, input_precision="ieee")
            if SLOTS > 2:
                acc += part * s2.to(tl.float32)[:, None]
                part = tl.dot(w3, tl.trans(x3), input_precision="ieee")
                acc += part * s3.to(tl.float32)[:, None]
            else:
                part = tl.dot(w3, tl.trans(x3), part, input_precision="ieee")
            if SLOTS == 2:
                acc += part * s2.to(tl.float32)[:, None]
            if SLOTS == 1:
                acc += part * s0.to(tl.float32)[:, None]
        if SLOTS > 0:
            ahead = column + BLOCK_K
            s0 = _of_group(scale_ptr, scale_stride, rows, ahead, K, GROUP)
            if zero_ptr is not None:
                z0 = _of_group(zero_ptr, scale_stride, rows, ahead, K, GROUP)
        if SLOTS > 1:
            s2 = _of_group(scale_ptr, scale_stride, rows, ahead + 2 * PART, K, GROUP)
            if zero_ptr is not None:
                z2 = _of_group(zero_ptr, scale_stride, rows, ahead + 2 * PART, K, GROUP)
        if SLOTS > 2:
            s1 = _of_group(scale_ptr, scale_stride, rows, ahead + PART, K, GROUP)
            s3 = _of_group(scale_ptr, scale_stride, rows, ahead + 3 * PART, K, GROUP)
            if zero_ptr is not None:
                z1 = _of_group(zero_ptr, scale_stride, rows, ahead + PART, K, GROUP)
                z3 = _of_group(zero_ptr, scale_stride, rows, ahead + 3 * PART, K, GROUP)
    return acc
