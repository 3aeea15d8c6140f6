"""Launches of the product of 8 bits by groups of warps on Hopper (warpgroup_kernel.py), and when it can run.

if takes_warpgroups(x8, weight): y = warpgroup_matmul_triton(x8, weight, torch.float16)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ingot.kernels.kernel_checks import merge_tiles, multiprocessors
from ingot.kernels.launch_overlap import launch_options
from ingot.kernels.product.int8.int8_launch import parted_sums, whole_sums
from ingot.kernels.product.int8.warpgroup_kernel import LOAD_REGISTERS, warpgroup_kernel
from ingot.kernels.product.int8.warpgroup_program import COLUMNS, OUTPUTS, WarpLoop
from ingot.kernels.product.product_arguments import scale_stride, sums_argument
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums
from ingot.kernels.tiles.int8_tiles import machine_of
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT, MAX_ROWS
from ingot.kernels.tiles.warpgroup_tiles import GROUP_ROWS, KEPT_BYTES, KEPT_ROWS, warpgroup_tiles
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, outputs_of

COLUMNS_PER_STEP, OUTPUTS_PER_GROUP = COLUMNS.value, OUTPUTS.value
WARPS = 4  # of a group
REGISTER_FILE, MOST_REGISTERS = 64 << 10, 248


def _aligned(tensor: torch.Tensor) -> bool:
    """Whether a descriptor can read or write the rows."""
    starts = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
    return all(start % DESCRIPTOR_ALIGNMENT == 0 for start in starts)


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of blocks of rows up to 128 bytes long, which are swizzled."""
    bits = 8 * tensor.element_size()
    layout = NVMMASharedLayout(swizzle_byte_width=columns * bits // 8, element_bitwidth=bits, rank=2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)


def registers(groups: int, programs: int) -> tuple[int, int]:
    """Registers per thread: at the start, and of the groups that multiply, which get those that the others
    give back.
    """
    each = REGISTER_FILE // (32 * WARPS * (groups + 1) * programs) // 8 * 8
    own = (each * (groups + 1) - LOAD_REGISTERS.value) // groups // 8 * 8
    return min(each, MOST_REGISTERS), min(own, MOST_REGISTERS)


def kept_steps(columns: int, splits: int, groups: int, block: int) -> int:
    """Steps whose rows' scales each group of warps keeps in shared memory, in whole 32; 0 if rows are few, or
    steps too many.
    """
    steps = triton.cdiv(triton.cdiv(columns, COLUMNS_PER_STEP), splits)
    kept = -(-steps // 32) * 32
    return kept if block >= KEPT_ROWS and kept * groups * block * 4 <= KEPT_BYTES else 0


def _launch(
    x: Int8Rows,
    weight: AnyInt8,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    choice: Mapping[str, int],
) -> None:
    """Write y [SPLITS * M, N]: int32 sums or, in a float dtype, scaled ones."""
    (rows, columns), outputs = x.values.shape, outputs_of(weight)
    groups, block, splits = choice["GROUPS"], choice["BLOCK_T"], choice["SPLITS"]
    sides = [side for side in (y, residual) if side is not None]
    pieces = choice["PIECE"] if y.element_size() == 2 and all(map(_aligned, sides)) else 0
    early, kept = False, 0
    if isinstance(weight, Int4Weight):
        four, stored = weight.group, weight.pairs
        levels: tuple[Any, ...] = (weight.scales, weight.steps, weight.zeros, weight.steps.stride(0))
    else:
        four, stored, levels = 0, weight.values, (weight.scales,)
        if weight.in_blocks:
            levels = (weight.scales, None, None, weight.scales.stride(0))
            early = not weight.temporary
            kept = kept_steps(columns, splits, groups, block) if rows <= block else 0
    loop = WarpLoop(
        four,
        x.group,
        groups,
        block,
        choice["num_stages"],
        pieces,
        choice["TOGETHER"],
        choice["OVERLAP"],
        early,
        kept,
    )
    tiles = triton.cdiv(rows, block) * triton.cdiv(outputs, OUTPUTS_PER_GROUP * groups)
    at_once = max(choice["PROGRAMS"] * multiprocessors(y.device) // splits, 1)
    each, own = registers(groups, choice["PROGRAMS"])
    warpgroup_kernel[(min(tiles, at_once), splits)](
        _descriptor(x.values, block, COLUMNS_PER_STEP),
        _descriptor(stored, OUTPUTS_PER_GROUP, COLUMNS_PER_STEP // 2 if four else COLUMNS_PER_STEP),
        _descriptor(y, pieces, OUTPUTS_PER_GROUP) if pieces else None,
        _descriptor(residual, pieces, OUTPUTS_PER_GROUP) if pieces and residual is not None else None,
        (x.scales, scale_stride(x)),
        levels,
        sums_argument(y, bias, residual),
        rows,
        outputs,
        columns,
        LOOP=loop,
        REGISTERS=own,
        maxnreg=each,
        **launch_options({**choice, "num_warps": WARPS}, y.device),
    )


def takes_warpgroups(x: Int8Rows, weight: AnyInt8) -> bool:
    """Whether the kernel can read these operands (aligned rows of int8, or of e4m3 and a weight in blocks,
    whole groups of a step's columns), and rows with groups are few enough. 128 rows in blocks were slower
    than by int8_matmul.py.
    """
    if x.values.dtype != torch.int8:
        if isinstance(weight, Int4Weight) or not weight.in_blocks or len(x.values) > MAX_ROWS:
            return False
        return _aligned(x.values) and _aligned(weight.values)
    if not isinstance(weight, Int4Weight):
        return not x.group and _aligned(x.values) and _aligned(weight.values)
    if x.group and (x.group != COLUMNS_PER_STEP or len(x.values) > GROUP_ROWS):
        return False
    return weight.group == COLUMNS_PER_STEP and _aligned(x.values) and _aligned(weight.pairs)


def _choice(
    x: Int8Rows, weight: AnyInt8, itemsize: int, split: bool, tiles: Mapping[str, int] | None
) -> dict[str, int]:
    (rows, width), outputs = x.values.shape, outputs_of(weight)
    four, machine = isinstance(weight, Int4Weight), machine_of(x.values.device)
    return merge_tiles(warpgroup_tiles(rows, outputs, width, itemsize, machine, x.group, four, split), tiles)


def warpgroup_matmul_triton(
    x: Int8Rows,
    weight: AnyInt8,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in ``int8_linear``, unchecked."""
    return whole_sums(_choice, _launch, x, weight, dtype, bias, residual, out, tiles)


def warpgroup_parts_triton(
    x: Int8Rows, weight: AnyInt8, tiles: Mapping[str, int] | None = None
) -> Int8Sums | torch.Tensor:
    """Launch the kernel; arguments as in :func:`int8_linear_parts`, unchecked."""
    return parted_sums(_choice, _launch, x, weight, tiles)
