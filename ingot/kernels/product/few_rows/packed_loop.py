"""The matrix product of a decode step with weights of 8 or 4 bits: x · Wᵀ, unpacked in registers.

A group's scale multiplies the sums of its columns in fp32; its zero is subtracted from the values, exactly.
stored_weight.py has the layout.

    acc = packed_tile(x, weight, rows, live, first, steps, LOOP)  # [BLOCK_N, BLOCK_T] fp32
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.launch_overlap import wait_for_previous
from ingot.kernels.product.product_arguments import InputRows, Weight
from ingot.kernels.weight.narrow_values import unpack, word_places


@triton.jit
def _of_group(ptr: tensor, stride: tensor, rows: tensor, column: tensor, LOOP: constexpr) -> tensor:
    """The scale or zero of each row for the group of a column, at most the last group."""
    group = tl.minimum(column // LOOP.GROUP, (LOOP.K - 1) // LOOP.GROUP)
    return tl.load(ptr + group * stride + rows)


@triton.jit
def _of_parts(
    ptr: tensor,
    stride: tensor,
    rows: tensor,
    column: tensor,
    PART: constexpr,
    SINGLE: constexpr,
    WHOLE: constexpr,
    LOOP: constexpr,
) -> tensor:
    """Scales or zeros of each row for a chunk's four parts (of two parts twice), from ``column`` on."""
    n0 = _of_group(ptr, stride, rows, column, LOOP)
    n1 = n0
    if SINGLE:
        n1 = _of_group(ptr, stride, rows, column + PART, LOOP)
    n2, n3 = n0, n1
    if LOOP.BITS == 4 and not WHOLE:
        n2 = _of_group(ptr, stride, rows, column + 2 * PART, LOOP)
        n3 = n2
        if SINGLE:
            n3 = _of_group(ptr, stride, rows, column + 3 * PART, LOOP)
    return n0, n1, n2, n3


@triton.jit
def _columns(x: InputRows, cols: tensor, start: tensor, LOOP: constexpr) -> tensor:
    """A part's columns of the rows of x, from ``start`` on."""
    token = tl.arange(0, LOOP.BLOCK_T)
    real = (token < x.tokens)[:, None]
    places = x.ptr + token[:, None] * x.stride + cols[None, :]
    if LOOP.K % LOOP.BLOCK_K != 0:
        part = tl.load(places + start, mask=real & (start + cols < LOOP.K)[None, :], other=0.0)
    else:
        part = tl.load(places + start, mask=real, other=0.0)
    return part


@triton.jit
def _parts(x: InputRows, cols: tensor, column: tensor, PART: constexpr, LOOP: constexpr) -> tensor:
    """The columns of x that a chunk's four parts multiply (of two parts twice)."""
    x0 = _columns(x, cols, column, LOOP)
    x1 = _columns(x, cols, column + PART, LOOP)
    x2, x3 = x0, x1
    if LOOP.BITS == 4:
        x2 = _columns(x, cols, column + 2 * PART, LOOP)
        x3 = _columns(x, cols, column + 3 * PART, LOOP)
    return x0, x1, x2, x3


@triton.jit
def _add_pair(
    acc: tensor, w0: tensor, x0: tensor, w1: tensor, x1: tensor, s0: tensor, s1: tensor, SINGLE: constexpr
) -> tensor:
    """acc + the products of two parts, each with its scale or (not SINGLE) with one."""
    sums = tl.dot(w0, tl.trans(x0), input_precision="ieee")
    if SINGLE:
        acc += sums * s0.to(tl.float32)[:, None]
        acc += tl.dot(w1, tl.trans(x1), input_precision="ieee") * s1.to(tl.float32)[:, None]
    else:
        acc += tl.dot(w1, tl.trans(x1), sums, input_precision="ieee") * s0.to(tl.float32)[:, None]
    return acc


@triton.jit
def packed_tile(
    x: InputRows, weight: Weight, rows: tensor, live: tensor, first: tensor, steps: tensor, LOOP: constexpr
) -> tensor:
    """Rows ``rows`` of the weight times each row of x, over ``steps`` chunks of BLOCK_K columns from chunk
    ``first``: [BLOCK_N, BLOCK_T] fp32, scaled. Rows that are not ``live`` (None: all are) are not read.

    A chunk's scales, not its zeros, are in registers one step ahead. PREFETCH 1 pipelines the weights alone,
    from before the wait on; any other also the rows of x, after it.
    """
    DTYPE: constexpr = x.ptr.dtype.element_ty
    BITS: constexpr = LOOP.BITS
    GROUP: constexpr = LOOP.GROUP
    BLOCK_T: constexpr = LOOP.BLOCK_T
    BLOCK_N: constexpr = LOOP.BLOCK_N
    BLOCK_K: constexpr = LOOP.BLOCK_K
    ASM: constexpr = LOOP.ASM
    FOUR: constexpr = BITS == 4
    PART: constexpr = BLOCK_K * BITS // 16
    ZEROS: constexpr = weight.zeros is not None
    # SINGLE: each part has its own group; WHOLE: all share one; otherwise two parts do.
    SINGLE: constexpr = GROUP > 0 and GROUP < 2 * PART
    WHOLE: constexpr = GROUP == 0 or GROUP >= BLOCK_K
    cols = tl.arange(0, PART)
    places = word_places(weight.ptr, weight.stride, rows, cols)
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    if LOOP.PREFETCH != 1:
        wait_for_previous(LOOP.OVERLAP)
    column = first * BLOCK_K
    middle = tl.full([BLOCK_N], 1 << (BITS - 1), dtype=tl.uint8)
    z0, z1, z2, z3 = middle, middle, middle, middle
    if GROUP > 0:
        s0, s1, s2, s3 = _of_parts(
            weight.scales, weight.scale_stride, rows, column, PART, SINGLE, WHOLE, LOOP
        )
    elif ZEROS:
        z0 = tl.load(weight.zeros + rows)
        z1, z2, z3 = z0, z0, z0
    for step in tl.range(0, steps):
        column = (first + step) * BLOCK_K
        # Not one step ahead like the scales: values carried through the loop would keep words from being
        # unpacked in the product's layout, and they would go through shared memory once more.
        if ZEROS and GROUP > 0:
            z0, z1, z2, z3 = _of_parts(
                weight.zeros, weight.scale_stride, rows, column, PART, SINGLE, WHOLE, LOOP
            )
        if live is not None:
            w = tl.load(places + (first + step) * (16 * PART), mask=live[:, None], other=0,
                        eviction_policy="evict_first")  # fmt: skip
        else:
            w = tl.load(places + (first + step) * (16 * PART), eviction_policy="evict_first")
        if LOOP.PREFETCH == 1:  # two branches with the same loads: see matrix_loop.py
            if step == 0:
                wait_for_previous(LOOP.OVERLAP)
                x0, x1, x2, x3 = _parts(x, cols, column, PART, LOOP)
            else:
                x0, x1, x2, x3 = _parts(x, cols, column, PART, LOOP)
        else:
            x0, x1, x2, x3 = _parts(x, cols, column, PART, LOOP)
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
            s0, s1, s2, s3 = _of_parts(
                weight.scales, weight.scale_stride, rows, ahead, PART, SINGLE, WHOLE, LOOP
            )
    if GROUP == 0:
        acc *= tl.load(weight.scales + rows).to(tl.float32)[:, None]
    return acc
