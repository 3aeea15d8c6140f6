"""The product of many rows and a weight, both in 8 bits: sums, scaled once, with bias and residual sum.

In a persistent kernel programs walk the tiles of the result, or of partial sums, in an order that keeps both
operands in L2. Operands are read through tensor descriptors (TMA) if they are aligned and the GPU has them,
otherwise through pointers. If rows have groups with scales, a step is a group, and its sums join the result
in fp32, where the weight's blocks have scales times these. int8_linear.py calls it.

    y = int8_matmul_triton(x8, weight, torch.float16)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ingot.kernels.kernel_checks import KernelArgumentError, merge_tiles, multiprocessors
from ingot.kernels.launch_overlap import launch_options, start_next, wait_for_previous
from ingot.kernels.product.int8.int8_epilogue import ended
from ingot.kernels.product.int8.int8_launch import parted_sums, whole_sums
from ingot.kernels.product.product_arguments import Sums, scale_stride, sums_argument
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Sums, Int8Weight
from ingot.kernels.tiles.int8_tiles import (
    DECODE_ROWS,
    large_int8_tiles,
    machine_of,
    tile_outputs,
    whole_steps,
)
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT

BLOCK_TILES = {  # of a weight in blocks, beyond DECODE_ROWS rows: 12 % faster on an H200 than those of groups
    "BLOCK_M": 64, "BLOCK_N": 128, "MORE_N": 0, "num_warps": 4, "num_stages": 3, "PIECES": 1, "PROGRAMS": 2,
}  # fmt: skip
EXACT_COLUMNS = 128  # of e4m3, whose sums in the tensor cores keep few bits


class LargeLoop(NamedTuple):
    """The kernel's constants: outputs, columns, the group of x, whether values are e4m3, whether programs
    walk the tiles, whether descriptors read both operands; then tiles, see ``large_int8_tiles``.
    """

    N: int
    K: int
    GROUP: int
    E4M3: bool
    WALK: bool
    TMA: bool
    BLOCK_M: int
    BLOCK_N: int
    MORE_N: int
    BLOCK_K: int
    TOGETHER: int
    PIECES: int
    SPLITS: int
    OVERLAP: int
    EXACT: int


class Large(NamedTuple):
    """An operand's row stride, its scales, and the stride of their rows, or blocks of rows."""

    stride: Any
    scales: Any
    scale_stride: Any = None


@triton.jit
def _operand(
    source: tensor,
    stride: tensor,
    first: tensor,
    end: tensor,
    column: tensor,
    BLOCK: constexpr,
    LOOP: constexpr,
) -> tensor:
    """Rows from ``first`` on, a step's columns from ``column`` on: [BLOCK, BLOCK_K], zeros past the end."""
    if LOOP.TMA:
        tile = source.load([first, column])
    else:
        SPAN: constexpr = LOOP.GROUP if LOOP.GROUP > 0 else LOOP.BLOCK_K
        rows, cols = first + tl.arange(0, BLOCK), tl.arange(0, LOOP.BLOCK_K)
        inside = (rows < end)[:, None] & ((column + cols < LOOP.K) & (cols < SPAN))[None, :]
        places = source + (rows.to(tl.int64) * stride)[:, None] + (column + cols)[None, :]
        tile = tl.load(places, mask=inside, other=0.0)
    return tile


@triton.jit
def _dot(a: tensor, w: tensor, acc: tensor, SUMS: constexpr, LOOP: constexpr) -> tensor:
    """acc + a · wᵀ. Tensor cores keep few bits of sums of e4m3: with EXACT those of so many columns join fp32
    sums, otherwise of all.
    """
    if LOOP.EXACT > 0:
        return tl.dot(a, tl.trans(w), acc, max_num_imprecise_acc=LOOP.EXACT, out_dtype=SUMS)
    return tl.dot(a, tl.trans(w), acc, out_dtype=SUMS)


@triton.jit(do_not_specialize=["num_rows"])
def int8_matmul_kernel(
    x_source: tensor,
    weight_source: tensor,
    more_source: tensor,
    x: tensor,
    weight: tensor,
    out: tensor,
    num_rows: tensor,
    LOOP: constexpr,
) -> None:
    """Tiles of BLOCK_M rows and BLOCK_N outputs, as far apart as there are programs; with SPLITS parts of
    their sums with equally many steps, the last ones past the end.

    MORE_N: more outputs per tile, in separate sums, for widths that are no powers of two; ``more_source`` is
    their weight. TOGETHER tiles of rows are done for one tile of outputs before the next. A tile is stored in
    PIECES, to save shared memory.
    """
    x, weight, out = Large(*x), Large(*weight), Sums(*out)
    N: constexpr = LOOP.N
    GROUP: constexpr = LOOP.GROUP
    BLOCK_M: constexpr = LOOP.BLOCK_M
    BLOCK_N: constexpr = LOOP.BLOCK_N
    MORE_N: constexpr = LOOP.MORE_N
    TOGETHER: constexpr = LOOP.TOGETHER
    start_next(LOOP.OVERLAP)
    SPAN: constexpr = GROUP if GROUP > 0 else LOOP.BLOCK_K
    ALL_STEPS: constexpr = (LOOP.K + SPAN - 1) // SPAN
    STEPS: constexpr = (ALL_STEPS + LOOP.SPLITS - 1) // LOOP.SPLITS
    TILE_N: constexpr = BLOCK_N + MORE_N
    TILES_N: constexpr = (N + TILE_N - 1) // TILE_N
    WIDTH: constexpr = BLOCK_N // LOOP.PIECES
    SUMS: constexpr = tl.float32 if LOOP.E4M3 else tl.int32
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    first_step = 0
    y_ptr = out.y
    if LOOP.SPLITS > 1:
        first_step = tl.program_id(1) * STEPS
        y_ptr += tl.program_id(1).to(tl.int64) * num_rows * N
    wait_for_previous(LOOP.OVERLAP)  # before the weight too: it may be a temporary
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=LOOP.WALK):
        band = tile // (TOGETHER * TILES_N)
        height = tl.minimum(tiles_m - band * TOGETHER, TOGETHER)
        place = tile - band * TOGETHER * TILES_N
        first_row = (band * TOGETHER + place % height) * BLOCK_M
        first_output = place // height * TILE_N
        rows = first_row + tl.arange(0, BLOCK_M)
        real = rows < num_rows
        x_scale_places = x.scales + rows.to(tl.int64) * x.scale_stride
        if GROUP > 0:
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            group = tl.minimum(first_step, ALL_STEPS - 1)
            x_scales = tl.load(x_scale_places + group, mask=real, other=0.0)
            if weight.scale_stride is not None:
                tl.static_assert(BLOCK_N <= 128)  # a tile has one block's outputs
                block_places = weight.scales + first_output // 128 * weight.scale_stride
                x_scales *= tl.load(block_places + group)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=SUMS)
            if MORE_N > 0:
                more = tl.zeros([BLOCK_M, MORE_N], dtype=SUMS)
        for step in tl.range(0, STEPS):
            column = (first_step + step) * SPAN
            a = _operand(x_source, x.stride, first_row, num_rows, column, BLOCK_M, LOOP)
            w = _operand(weight_source, weight.stride, first_output, N, column, BLOCK_N, LOOP)
            if GROUP > 0:
                group = tl.minimum(first_step + step + 1, ALL_STEPS - 1)
                ahead = tl.load(x_scale_places + group, mask=real, other=0.0)
                if weight.scale_stride is not None:
                    ahead *= tl.load(block_places + group)
                acc += _dot(a, w, None, SUMS, LOOP).to(tl.float32) * x_scales[:, None]
                x_scales = ahead
            else:
                if MORE_N > 0:
                    more_w = _operand(
                        more_source, weight.stride, first_output + BLOCK_N, N, column, MORE_N, LOOP
                    )
                acc = _dot(a, w, acc, SUMS, LOOP)
                if MORE_N > 0:
                    more = _dot(a, more_w, more, SUMS, LOOP)
        if GROUP == 0:
            x_scales = tl.load(x_scale_places, mask=real, other=0.0)
        if LOOP.PIECES == 2:
            low, high = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, WIDTH]), [0, 2, 1]))
            _store(low, x_scales, first_output, rows, real, weight, out, y_ptr, WIDTH, LOOP)
            _store(high, x_scales, first_output + WIDTH, rows, real, weight, out, y_ptr, WIDTH, LOOP)
        else:
            _store(acc, x_scales, first_output, rows, real, weight, out, y_ptr, WIDTH, LOOP)
        if MORE_N > 0:
            _store(more, x_scales, first_output + BLOCK_N, rows, real, weight, out, y_ptr, MORE_N, LOOP)


@triton.jit
def _store(
    acc: tensor,
    x_scales: tensor,
    first_output: tensor,
    rows: tensor,
    real: tensor,
    weight: Large,
    out: Sums,
    y_ptr: tensor,
    WIDTH: constexpr,
    LOOP: constexpr,
) -> None:
    """Scale sums, add bias and residual, round once; store int32 sums as they are."""
    outputs = first_output + tl.arange(0, WIDTH)
    wanted = outputs < LOOP.N
    inside = real[:, None] & wanted[None, :]
    if y_ptr.dtype.element_ty == tl.int32:
        y = acc
    else:
        row_scales, bias, residual = None, None, None
        if LOOP.GROUP == 0:
            row_scales = x_scales[:, None]
        weight_scales = None
        if weight.scale_stride is None:
            weight_scales = tl.load(weight.scales + outputs, mask=wanted, other=0.0)[None, :]
        if out.bias is not None:
            bias = tl.load(out.bias + outputs, mask=wanted, other=0.0)[None, :]
        if out.residual is not None:
            places = (rows.to(tl.int64) * out.residual_stride)[:, None] + outputs[None, :]
            residual = tl.load(out.residual + places, mask=inside, other=0.0)
        y = ended(acc, row_scales, weight_scales, bias, residual, y_ptr.dtype.element_ty)
    tl.store(y_ptr + (rows.to(tl.int64) * LOOP.N)[:, None] + outputs[None, :], y, mask=inside)


def aligned(x: Int8Rows, weight: Int8Weight) -> bool:
    """Whether all rows start at multiples of 16 bytes."""
    starts = (start for t in (x.values, weight.values) for start in (t.data_ptr(), t.stride(0)))
    return all(start % DESCRIPTOR_ALIGNMENT == 0 for start in starts)


def _described(x: Int8Rows, weight: Int8Weight, choice: Mapping[str, int]) -> bool:
    """Whether descriptors read both: aligned rows, steps that are groups. The tile ``TMA`` 2 demands it."""
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
    machine, e4m3 = machine_of(x.values.device), x.values.dtype == E4M3
    # Sums that join others take registers, as scaled ones of groups do.
    group = x.group or EXACT_COLUMNS * e4m3
    defaults = large_int8_tiles(rows, outputs, width, itemsize, machine, group, aligned(x, weight), split)
    if weight.in_blocks and rows > DECODE_ROWS:
        defaults |= BLOCK_TILES
    choice = whole_steps(merge_tiles(defaults | {"EXACT": EXACT_COLUMNS * e4m3}, tiles), x.group)
    return choice | {"EXACT": min(choice["EXACT"], choice["BLOCK_K"])}


def _launch(
    x: Int8Rows,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    choice: Mapping[str, int],
) -> None:
    """Write y [SPLITS * M, N]: int32 sums or, in a float dtype, scaled ones."""
    (rows, width), outputs = x.values.shape, weight.values.shape[0]
    tma = _described(x, weight, choice)
    count = triton.cdiv(rows, choice["BLOCK_M"]) * triton.cdiv(outputs, tile_outputs(choice))
    at_once = choice["PROGRAMS"] * multiprocessors(y.device) // choice["SPLITS"]
    walk = choice["PROGRAMS"] > 0
    e4m3 = x.values.dtype == E4M3
    sizes = {name: choice[name] for name in LargeLoop._fields[6:]}
    loop = LargeLoop(outputs, width, x.group, e4m3, walk, tma, **sizes)
    int8_matmul_kernel[(min(count, max(at_once, 1)) if walk else count, choice["SPLITS"])](
        _source(x.values, choice["BLOCK_M"], choice, tma),
        _source(weight.values, choice["BLOCK_N"], choice, tma),
        _source(weight.values, choice["MORE_N"], choice, tma) if choice["MORE_N"] else None,
        (x.values.stride(0), x.scales, scale_stride(x)),
        (weight.values.stride(0), weight.scales, weight.scales.stride(0) if weight.in_blocks else None),
        sums_argument(y, bias, residual),
        rows,
        LOOP=loop,
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
    """Launch the kernel; arguments as in ``int8_linear``, unchecked; ``dtype`` int32 gives the exact sums of
    rows without groups.
    """
    return whole_sums(_choice, _launch, x, weight, dtype, bias, residual, out, tiles)


def int8_matmul_parts_triton(
    x: Int8Rows, weight: Int8Weight, tiles: Mapping[str, int] | None = None
) -> Int8Sums | torch.Tensor:
    """Launch the kernel; arguments as in :func:`int8_linear_parts`, unchecked."""
    return parted_sums(_choice, _launch, x, weight, tiles)
