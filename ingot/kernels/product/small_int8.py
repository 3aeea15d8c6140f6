"""Products of a few rows and a weight, both of 8 bits: exact sums, scaled once.

Owns the launch of small_linear.py's kernel with numbers instead of floats. Knows no more rows than 64
(int8_linear.py chooses by them).

    parts = small_int8_parts_triton(x8, weight)      # sum_norm adds them up
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from ingot.kernels.checks import merge_tiles
from ingot.kernels.overlap import launch_options
from ingot.kernels.product.int8_checks import scale_stride
from ingot.kernels.product.int8_fragments import int8_fragment_linear_kernel
from ingot.kernels.product.matrix_product import even_share
from ingot.kernels.product.small_linear import small_linear_matrix_kernel
from ingot.kernels.product.small_product import expect_rows
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums
from ingot.kernels.tiles.int8_tiles import INT8_FRAGMENT_ROWS, small_int8_tiles, waiting, whole_steps
from ingot.kernels.weight.expand_int8 import whole_int8
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight


def _choice(
    x: Int8Rows, weight: AnyInt8, split: bool, tiles: Mapping[str, int] | None
) -> tuple[AnyInt8, dict[str, int]]:
    """The weight as it is multiplied, and tiles."""
    rows, width = x.values.shape
    four_bits = isinstance(weight, Int4Weight)
    defaults = small_int8_tiles(rows, len(weight.scales), width, x.values.device, x.group, split, four_bits)
    wanted = whole_steps(merge_tiles(defaults, tiles), x.group)
    if x.group and not split:
        wanted["FRAGMENTS"] = 0  # a whole sum adds its groups in one order, by any number of rows
    weight, choice = settled(x, weight, wanted)
    expect_rows(choice, rows)
    # A part without columns would have nothing to wait for.
    choice["SPLITS"] = min(choice["SPLITS"], triton.cdiv(width, x.group or choice["BLOCK_K"]))
    return weight, choice


def settled(x: Int8Rows, weight: AnyInt8, choice: Mapping[str, int]) -> tuple[AnyInt8, dict[str, int]]:
    """The weight as it is multiplied, and the choice: a weight of 4 bits as it is where the tile FRAGMENTS
    asks for it and rows and tiles have room, at most 16 rows, rows that start at multiples of 16 bytes,
    chunks of whole 128 columns, no shares; else written as int8, without FRAGMENTS.
    """
    rows, width = x.values.shape
    if choice["FRAGMENTS"] and isinstance(weight, Int4Weight):
        sides = (x.values, weight.pairs)
        fits = width % 16 == 0 and all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in sides)
        chunks = choice["BLOCK_K"] % 128 == 0 and x.group in (0, choice["BLOCK_K"])
        if rows <= INT8_FRAGMENT_ROWS and fits and chunks and not choice["PROGRAMS"]:
            return weight, dict(choice)
    weight = whole_int8(weight)
    return weight, waiting({**choice, "FRAGMENTS": 0}, weight.temporary)


def fragment_pointers(weight: Int4Weight) -> tuple[Any, ...]:
    """The weight and its scales as kernels take them that load it straight into registers."""
    levels = (weight.steps, weight.zeros, weight.steps.stride(0))
    return (weight.pairs, weight.pairs.stride(0), weight.scales, *levels)


def fragment_shape(choice: Mapping[str, int], x: Int8Rows, weight: Int4Weight) -> dict[str, int]:
    """The constants of a product whose weight goes straight into registers."""
    names = ("BLOCK_N", "BLOCK_K", "FRAGMENTS", "OVERLAP")
    shape = {name: choice[name] for name in names} | {"K": x.values.shape[1], "num_stages": 1}
    shape["WEIGHT_HALF"] = weight.group // 2
    return shape | {"WARPS": choice["num_warps"], "ASM": x.values.device.type != "cpu"}


def int8_shape(choice: Mapping[str, int], x: Int8Rows) -> dict[str, int]:
    """The constants of a product's kernel for an op's tiles."""
    names = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "PREFETCH", "OVERLAP", "num_stages")
    shape = {"K": x.values.shape[1], "BITS": 8, "GROUP": x.group, "ASM": False}
    return {**shape, **{name: choice[name] for name in names}}


def _stride(x: Int8Rows) -> int | None:
    """Numbers between the scales of two rows; None where all rows share those of groups."""
    shared = x.group and (x.scales.stride(0) == 0 or len(x.scales) == 1)
    return None if shared else scale_stride(x)


def _launch(
    x: Int8Rows,
    weight: AnyInt8,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    choice: Mapping[str, int],
) -> None:
    """Into y [SPLITS * M, N]: int32 sums or, of floats, what they mean."""
    scaled = y.dtype != torch.int32
    outputs = len(weight.scales)
    if isinstance(weight, Int4Weight):
        int8_fragment_linear_kernel[(triton.cdiv(outputs, choice["BLOCK_N"]), choice["SPLITS"])](
            *(x.values, *fragment_pointers(weight), bias, residual, y),
            *(x.values.shape[0], x.values.stride(0), 0 if residual is None else residual.stride(0)),
            x.scales if scaled else None,
            _stride(x) if scaled else 0,
            N=outputs,
            GROUP=x.group,
            SPLITS=choice["SPLITS"],
            **fragment_shape(choice, x, weight),
            **launch_options(choice, y.device),
        )
        return
    share = even_share(outputs, choice["BLOCK_N"], choice, y.device)
    small_linear_matrix_kernel[(triton.cdiv(outputs, share), choice["SPLITS"])](
        x.values,
        weight.values,
        weight.values.stride(0),
        weight.scales,
        0,
        None,
        bias,
        residual,
        y,
        x.values.shape[0],
        x.values.stride(0),
        0 if residual is None else residual.stride(0),
        x.scales if scaled else None,
        _stride(x) if scaled else 0,
        N=outputs,
        SHARE=share,
        SPLITS=choice["SPLITS"],
        **int8_shape(choice, x),
        **launch_options(choice, y.device),
    )


def small_int8_linear_triton(
    x: Int8Rows,
    weight: AnyInt8,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`ingot.kernels.product.int8_linear.int8_linear`, unchecked."""
    shape = (x.values.shape[0], len(weight.scales))
    y = torch.empty(shape, dtype=dtype, device=x.values.device) if out is None else out
    if y.numel():
        weight, choice = _choice(x, weight, False, tiles)
        _launch(x, weight, bias, residual, y, choice | {"SPLITS": 1})
    return y


def small_int8_parts_triton(
    x: Int8Rows, weight: AnyInt8, tiles: Mapping[str, int] | None = None
) -> Int8Sums | torch.Tensor:
    """Launch the kernel; arguments as in :func:`int8_linear_parts`, unchecked."""
    weight, choice = _choice(x, weight, True, tiles)
    shape = (choice["SPLITS"], x.values.shape[0], len(weight.scales))
    dtype = torch.float32 if x.group else torch.int32
    y = torch.empty(shape, dtype=dtype, device=x.values.device)
    if y.numel():
        _launch(x, weight, None, None, y, choice)
    return y if x.group else Int8Sums(y, x.scales, weight.scales)
