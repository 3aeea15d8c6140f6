"""The matrix product of a decode step for 2 to 64 rows: x · Wᵀ with the weight as the left operand.

Owns the loop that streams a tile of the weight through shared memory, several steps ahead and already while
the kernel before still runs. Rows and weight are both floats or both int8 (int8_rows.py). Knows no norm and
no epilogue: the rows come normalised.

    acc = matrix_tile(x_ptr, ...)  # [BLOCK_N, BLOCK_T] fp32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import multiprocessors
from ingot.kernels.overlap import LINE_BYTES, prefetch_lines, wait_for_previous
from ingot.kernels.product.packed_product import packed_tile
from ingot.kernels.weight.stored_weight import StoredWeight


@triton.jit
def _weights(
    places: tl.tensor, columns: tl.tensor, live: tl.tensor, K: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
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
def _row_scales(
    ptr: tl.tensor,
    stride: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    group: tl.tensor,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Scales of the rows of x, or of one of their GROUPS groups (the last where there are no more); without a
    ``stride`` all rows share a group's, which is read once.
    """
    if ptr is None:
        scales = tl.zeros(token.shape, dtype=tl.float32)
    elif stride is None:
        scales = tl.full(token.shape, tl.load(ptr + tl.minimum(group, GROUPS - 1)), dtype=tl.float32)
    else:
        scales = tl.load(ptr + token * stride + tl.minimum(group, GROUPS - 1), mask=token < tokens, other=0.0)
    return scales


@triton.jit
def _add(acc: tl.tensor, w: tl.tensor, x: tl.tensor, scales: tl.tensor, GROUPED: tl.constexpr) -> tl.tensor:
    """acc + w · xᵀ; of a group in 8 bits with the rows' scales."""
    if GROUPED:
        acc += tl.dot(w, tl.trans(x), out_dtype=tl.int32).to(tl.float32) * scales[None, :]
    elif x.dtype == tl.int8:
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
    else:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit
def matrix_tile(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_scale_stride: tl.tensor,
    tokens: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    scale_ptr: tl.tensor,
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
) -> tl.tensor:
    """Rows ``rows`` of the weight times each row of x, over ``steps`` steps of BLOCK_K columns from step
    ``first``: [BLOCK_N, BLOCK_T] fp32. Rows that are not ``live`` (None: all are) are not read.

    Numbers of 8 bits are multiplied exactly; without ``x_scale_ptr`` the sums stay int32. Where GROUP columns
    of x share a scale a step is such a group, BLOCK_K at least as wide.

    With PREFETCH 1 and 2 only the weight's loads are pipelined: the compiler starts them ahead of the loop,
    before the wait for the previous kernel. The rows of x come from L2, with 2 a step ahead in registers.
    With PREFETCH 0 both are pipelined, after the wait; with more than 2 so many columns of the rows are asked
    into L2 before it.
    """
    LINE: tl.constexpr = LINE_BYTES // (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
    INT8: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    GROUPED: tl.constexpr = INT8 and GROUP > 0
    SPAN: tl.constexpr = GROUP if GROUPED else BLOCK_K
    GROUPS: tl.constexpr = K // GROUP if GROUPED else 1
    MASKED: tl.constexpr = K % BLOCK_K != 0 or SPAN < BLOCK_K
    token = tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_K)
    real = (token < tokens)[:, None]
    if SPAN < BLOCK_K:
        real = real & (cols < SPAN)[None, :]
    columns = x_ptr + token[:, None] * x_stride + cols[None, :]
    places = weight_ptr + (rows.to(tl.int64) * weight_stride)[:, None] + cols[None, :]
    if x_scale_ptr is not None:
        scales = tl.load(scale_ptr + rows)[:, None]  # constants: asked for before the wait
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.int32 if INT8 and not GROUPED else tl.float32)
    x_scales = tl.zeros([BLOCK_T], dtype=tl.float32)
    x = tl.zeros([BLOCK_T, BLOCK_K], dtype=x_ptr.dtype.element_ty)
    if PREFETCH == 0 or PREFETCH > 2:
        if PREFETCH > 2 and OVERLAP > 1:
            ahead = first * SPAN + tl.arange(0, PREFETCH // LINE) * LINE
            wanted = (ahead < K)[None, :] & (rows >= 0)[:, None]
            if live is not None:
                wanted = wanted & live[:, None]
            prefetch_lines(weight_ptr + (rows.to(tl.int64) * weight_stride)[:, None] + ahead[None, :], wanted)
        wait_for_previous(OVERLAP)
        x_scales = _row_scales(x_scale_ptr, x_scale_stride, token, tokens, first * GROUPED, GROUPS)
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
        # Two branches, though they load the same: what a branch loads is not pipelined, and so not asked for
        # before the wait, and it keeps the layout that it is loaded in.
        if PREFETCH == 2:
            if step == 0:
                wait_for_previous(OVERLAP)
                x = tl.load(columns + here, mask=now, other=0.0)
                x_scales = _row_scales(x_scale_ptr, x_scale_stride, token, tokens, first * GROUPED, GROUPS)
                ahead = tl.load(columns + there, mask=then, other=0.0)
            else:
                x = tl.load(columns + here, mask=now & (step < 0), other=x)  # loads nothing, keeps the layout
                ahead = tl.load(columns + there, mask=then, other=0.0)
            acc = _add(acc, w, x, x_scales, GROUPED)
            x = ahead
        elif PREFETCH == 1:
            if step == 0:
                wait_for_previous(OVERLAP)
                x = tl.load(columns + here, mask=now, other=0.0)
                x_scales = _row_scales(x_scale_ptr, x_scale_stride, token, tokens, first * GROUPED, GROUPS)
            else:
                x = tl.load(columns + here, mask=now, other=0.0)
            acc = _add(acc, w, x, x_scales, GROUPED)
        else:
            x = tl.load(columns + here, mask=now, other=0.0)
            acc = _add(acc, w, x, x_scales, GROUPED)
        if GROUPED:
            x_scales = _row_scales(x_scale_ptr, x_scale_stride, token, tokens, first + step + 1, GROUPS)
    if x_scale_ptr is not None:
        if not GROUPED:
            acc = acc.to(tl.float32) * x_scales[None, :]
        acc *= scales
    return acc


@triton.jit
def weight_tile(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_scale_stride: tl.tensor,
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
    """``matrix_tile``, or, of a weight of fewer BITS than x, ``packed_tile``: [BLOCK_N, BLOCK_T]."""
    if BITS == 16 or x_ptr.dtype.element_ty == tl.int8:
        acc = matrix_tile(x_ptr, x_stride, x_scale_ptr, x_scale_stride, tokens, weight_ptr, weight_stride,
                          scale_ptr, rows, live, first, steps, K, GROUP, BLOCK_T, BLOCK_N, BLOCK_K,
                          PREFETCH, OVERLAP)  # fmt: skip
    else:
        acc = packed_tile(x_ptr, x_stride, tokens, weight_ptr, weight_stride, scale_ptr, scale_stride,
                          zero_ptr, rows, live, first, steps, K, BITS, GROUP, BLOCK_T, BLOCK_N, BLOCK_K,
                          PREFETCH, OVERLAP, ASM)  # fmt: skip
    return acc


def even_share(outputs: int, block: int, choice: Mapping[str, int], device: torch.device) -> int:
    """Outputs of a program, at most ``block``, such that waves of PROGRAMS a multiprocessor share them
    evenly; with PROGRAMS 0 whole blocks.
    """
    if choice["PROGRAMS"] == 0:
        return block
    at_once = max(choice["PROGRAMS"] * multiprocessors(device) // choice.get("SPLITS", 1), 1)
    waves = triton.cdiv(outputs, block * at_once)
    return min(triton.cdiv(outputs, waves * at_once), block)


def matrix_shape(choice: Mapping[str, int], weight: StoredWeight) -> dict[str, int]:
    """The constants and the depth of a matrix product's kernel for an op's tiles."""
    names = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "PREFETCH", "OVERLAP", "num_stages")
    return {**number_format(weight), **{name: choice[name] for name in names}}


def number_format(weight: StoredWeight) -> dict[str, int]:
    """The constants of a weight's width and numbers; the interpreter knows no inline assembly."""
    asm = weight.bits != 16 and weight.values.device.type != "cpu"
    return {"K": weight.in_features, "BITS": weight.bits, "GROUP": weight.group, "ASM": asm}


def weight_pointers(weight: StoredWeight) -> tuple[Any, ...]:
    """Values with their stride, scales with theirs, zeros: a kernel's arguments."""
    stride = weight.scales.stride(0) if weight.scales is not None and weight.group else 0
    return weight.values, weight.values.stride(0), weight.scales, stride, weight.zeros
