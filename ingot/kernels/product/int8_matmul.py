"""The product of many rows and a weight, both of 8 bits: exact sums, scaled once, with bias and residual sum.

Owns a persistent kernel whose programs walk the tiles of the result, or of parts of its sums, in an order
that keeps both operands in L2, and its launch. Operands come through tensor descriptors (TMA) where they are
aligned and the GPU has them, else through pointers. Where rows have groups with scales of their own, a step
is a group, and its sums join the result in fp32. Knows no fewer rows than a tile is worth (int8_linear.py
chooses).

    y = int8_matmul_triton(x8, weight, torch.float16)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ingot.kernels.checks import KernelArgumentError, merge_tiles, multiprocessors
from ingot.kernels.overlap import launch_options, start_next, wait_for_previous
from ingot.kernels.product.int8_checks import scale_stride
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, Int8Weight
from ingot.kernels.tiles.int8_tiles import large_int8_tiles, machine_of, tile_outputs, whole_steps
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT

CONSTANTS = ("BLOCK_M", "BLOCK_N", "MORE_N", "BLOCK_K", "TOGETHER", "PIECES", "SPLITS", "OVERLAP")


@triton.jit
def _operand(
    source: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
) -> tl.tensor:
    """Rows from ``first`` on, SPAN columns from ``column`` on: [BLOCK, BLOCK_K], zeros beyond."""
    if TMA:
        tile = source.load([first, column])
    else:
        rows, cols = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
        inside = (rows < end)[:, None] & ((column + cols < K) & (cols < SPAN))[None, :]
        places = source + (rows.to(tl.int64) * stride)[:, None] + (column + cols)[None, :]
        tile = tl.load(places, mask=inside, other=0)
    return tile


@triton.jit(do_not_specialize=["num_rows"])
def int8_matmul_kernel(
    x_source: tl.tensor,
    weight_source: tl.tensor,
    more_source: tl.tensor,
    x_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    x_scale_stride: tl.tensor,
    residual_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MORE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    PIECES: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
    WALK: tl.constexpr,
    TMA: tl.constexpr,
) -> None:
    """Tiles of BLOCK_M rows and BLOCK_N outputs, a whole stride of programs apart; with SPLITS parts of their
    sums, each of as many steps, the last ones past the end.

    MORE_N: so many outputs more a tile, in sums of their own, which makes widths that are no powers of two;
    ``more_source`` is the weight for them. TOGETHER tiles of rows are done for one tile of outputs before the
    next. A tile is stored in PIECES, which take so much less shared memory.
    """
    start_next(OVERLAP)
    SPAN: tl.constexpr = GROUP if GROUP > 0 else BLOCK_K
    ALL_STEPS: tl.constexpr = (K + SPAN - 1) // SPAN
    STEPS: tl.constexpr = (ALL_STEPS + SPLITS - 1) // SPLITS
    TILE_N: tl.constexpr = BLOCK_N + MORE_N
    TILES_N: tl.constexpr = (N + TILE_N - 1) // TILE_N
    WIDTH: tl.constexpr = BLOCK_N // PIECES
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    first_step = 0
    if SPLITS > 1:
        first_step = tl.program_id(1) * STEPS
        y_ptr += tl.program_id(1).to(tl.int64) * num_rows * N
    wait_for_previous(OVERLAP)  # before the weight, too: it may be a temporary
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=WALK):
        band = tile // (TOGETHER * TILES_N)
        height = tl.minimum(tiles_m - band * TOGETHER, TOGETHER)
        place = tile - band * TOGETHER * TILES_N
        first_row = (band * TOGETHER + place % height) * BLOCK_M
        first_output = place // height * TILE_N
        rows = first_row + tl.arange(0, BLOCK_M)
        real = rows < num_rows
        x_scale_places = x_scale_ptr + rows.to(tl.int64) * x_scale_stride
        if GROUP > 0:
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            group = tl.minimum(first_step, ALL_STEPS - 1)
            x_scales = tl.load(x_scale_places + group, mask=real, other=0.0)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
            if MORE_N > 0:
                more = tl.zeros([BLOCK_M, MORE_N], dtype=tl.int32)
        for step in tl.range(0, STEPS):
            column = (first_step + step) * SPAN
            x = _operand(x_source, x_stride, first_row, num_rows, column, K, SPAN, BLOCK_M, BLOCK_K, TMA)
            w = _operand(weight_source, weight_stride, first_output, N, column, K, SPAN, BLOCK_N, BLOCK_K,
                         TMA)  # fmt: skip
            if GROUP > 0:
                group = tl.minimum(first_step + step + 1, ALL_STEPS - 1)
                ahead = tl.load(x_scale_places + group, mask=real, other=0.0)
                acc += tl.dot(x, tl.trans(w), out_dtype=tl.int32).to(tl.float32) * x_scales[:, None]
                x_scales = ahead
            else:
                if MORE_N > 0:
                    more_w = _operand(more_source, weight_stride, first_output + BLOCK_N, N, column, K, SPAN,
                                      MORE_N, BLOCK_K, TMA)  # fmt: skip
                acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
                if MORE_N > 0:
                    more = tl.dot(x, tl.trans(more_w), more, out_dtype=tl.int32)
        if GROUP == 0:
            x_scales = tl.load(x_scale_places, mask=real, other=0.0)
        if PIECES == 2:
            low, high = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, WIDTH]), [0, 2, 1]))
            _store(low, x_scales, first_output, rows, real, scale_ptr, bias_ptr, residual_ptr, y_ptr,
                   residual_stride, N, GROUP, WIDTH)  # fmt: skip
            _store(high, x_scales, first_output + WIDTH, rows, real, scale_ptr, bias_ptr, residual_ptr, y_ptr,
                   residual_stride, N, GROUP, WIDTH)  # fmt: skip
        else:
            _store(acc, x_scales, first_output, rows, real, scale_ptr, bias_ptr, residual_ptr, y_ptr,
                   residual_stride, N, GROUP, WIDTH)  # fmt: skip
        if MORE_N > 0:
            _store(more, x_scales, first_output + BLOCK_N, rows, real, scale_ptr, bias_ptr, residual_ptr,
                   y_ptr, residual_stride, N, GROUP, MORE_N)  # fmt: skip


@triton.jit
def _store(
    acc: tl.tensor,
    x_scales: tl.tensor,
    first_output: tl.tensor,
    rows: tl.tensor,
    real: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    residual_stride: tl.tensor,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Scale sums, add bias and residual, round once; into int32 the sums as they are."""
    outputs = first_output + tl.arange(0, WIDTH)
    wanted = outputs < N
    inside = real[:, None] & wanted[None, :]
    if y_ptr.dtype.element_ty == tl.int32:
        y = acc
    else:
        y = acc.to(tl.float32)
        if GROUP == 0:
            y *= x_scales[:, None]
        y *= tl.load(scale_ptr + outputs, mask=wanted, other=0.0)[None, :]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + outputs, mask=wanted, other=0.0).to(tl.float32)[None, :]
        if residual_ptr is not None:
            places = (rows.to(tl.int64) * residual_stride)[:, None] + outputs[None, :]
            y += tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
        y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (rows.to(tl.int64) * N)[:, None] + outputs[None, :], y, mask=inside)


def aligned(x: Int8Rows, weight: Int8Weight) -> bool:
    """Whether all rows start at multiples of 16 bytes."""
    sides = (x.values, weight.values)
    return all(
        t.data_ptr() % DESCRIPTOR_ALIGNMENT == 0 and t.stride(0) % DESCRIPTOR_ALIGNMENT == 0 for t in sides
    )


def _described(x: Int8Rows, weight: Int8Weight, choice: Mapping[str, int]) -> bool:
    """Whether descriptors read both: rows that are aligned, whole steps of groups.

    Raises:
        KernelArgumentError: the tile ``TMA`` is 2 and they cannot.
    """
    fits = aligned(x, weight) and x.group in (0, choice["BLOCK_K"])
    if choice["TMA"] == 2 and not fits:
        strides = x.values.stride(0), weight.values.stride(0)
        raise KernelArgumentError(
            "these operands cannot be read through tensor descriptors",
            seen=f"strides {strides}, groups of {x.group}",
            allowed=f"rows that start at multiples of {DESCRIPTOR_ALIGNMENT} bytes",
            fix='tiles {"TMA": 1}',
        )
    return choice["TMA"] != 1 and fits


def _source(tensor: torch.Tensor, rows: int, choice: Mapping[str, int], tma: bool) -> Any:
    if not tma:
        return tensor
    block = [rows, choice["BLOCK_K"]]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _choice(
    x: Int8Rows, weight: Int8Weight, itemsize: int, split: bool, tiles: Mapping[str, int] | None
) -> dict[str, int]:
    (rows, width), outputs = x.values.shape, weight.values.shape[0]
    machine = machine_of(x.values.device)
    defaults = large_int8_tiles(rows, outputs, width, itemsize, machine, x.group, aligned(x, weight), split)
    return whole_steps(merge_tiles(defaults, tiles), x.group)


def _launch(
    x: Int8Rows,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    choice: Mapping[str, int],
) -> None:
    """Into y [SPLITS * M, N]: int32 sums or, of floats, what they mean."""
    (rows, width), outputs = x.values.shape, weight.values.shape[0]
    tma = _described(x, weight, choice)
    count = triton.cdiv(rows, choice["BLOCK_M"]) * triton.cdiv(outputs, tile_outputs(choice))
    at_once = choice["PROGRAMS"] * multiprocessors(y.device) // choice["SPLITS"]
    walk = choice["PROGRAMS"] > 0
    int8_matmul_kernel[(min(count, max(at_once, 1)) if walk else count, choice["SPLITS"])](
        _source(x.values, choice["BLOCK_M"], choice, tma),
        _source(weight.values, choice["BLOCK_N"], choice, tma),
        _source(weight.values, choice["MORE_N"], choice, tma) if choice["MORE_N"] else None,
        x.scales,
        weight.scales,
        bias,
        residual,
        y,
        rows,
        x.values.stride(0),
        weight.values.stride(0),
        scale_stride(x),
        0 if residual is None else residual.stride(0),
        N=outputs,
        K=width,
        GROUP=x.group,
        WALK=walk,
        TMA=tma,
        **{name: choice[name] for name in CONSTANTS},
        num_stages=choice["num_stages"],
        **launch_options(choice, y.device),
    )


def int8_matmul_triton(
    x: Int8Rows,
    weight: Int8Weight,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`ingot.kernels.product.int8_linear.int8_linear`, unchecked.

    ``dtype`` int32 gives the exact sums; rows with groups have none.
    """
    shape = (x.values.shape[0], weight.values.shape[0])
    y = torch.empty(shape, dtype=dtype, device=x.values.device) if out is None else out
    if y.numel():
        choice = _choice(x, weight, dtype.itemsize, False, tiles)
        _launch(x, weight, bias, residual, y, choice | {"SPLITS": 1})
    return y


def int8_matmul_parts_triton(
    x: Int8Rows, weight: Int8Weight, tiles: Mapping[str, int] | None = None
) -> Int8Sums | torch.Tensor:
    """Launch the kernel; arguments as in :func:`int8_linear_parts`, unchecked."""
    dtype = torch.float32 if x.group else torch.int32
    choice = _choice(x, weight, dtype.itemsize, True, tiles)
    shape = (choice["SPLITS"], x.values.shape[0], weight.values.shape[0])
    y = torch.empty(shape, dtype=dtype, device=x.values.device)
    if y.numel():
        _launch(x, weight, None, None, y, choice)
    return y if x.group else Int8Sums(y, x.scales, weight.scales)
