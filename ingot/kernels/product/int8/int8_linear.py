"""A linear layer with activations and weight in 8 bits, for any number of rows.

y = cast(sums · x scales · weight scales + bias + residual) with exact sums, whole or in parts, by the kernel
of few rows or that of many.

    y = int8_linear(x8, weight, torch.float16, bias)
    parts = int8_linear_parts(x8, weight)      # sum_norm adds them up
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.kernel_checks import (
    FLOAT_DTYPES,
    KernelArgumentError,
    expect,
    expect_contiguous,
    expect_range,
    runs_on_gpu,
)
from ingot.kernels.product.few_rows.small_int8 import small_int8_linear_triton, small_int8_parts_triton
from ingot.kernels.product.int8.fp8_library import library_linear, library_takes
from ingot.kernels.product.int8.int8_matmul import aligned, int8_matmul_parts_triton, int8_matmul_triton
from ingot.kernels.product.int8.warpgroup_matmul import (
    takes_warpgroups,
    warpgroup_matmul_triton,
    warpgroup_parts_triton,
)
from ingot.kernels.product.product_arguments import expect_product
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Sums, Int8Weight, int8_product, int8_sums
from ingot.kernels.tiles.int8_tiles import DECODE_ROWS, FEW_PARTS, INT8_FRAGMENT_ROWS
from ingot.kernels.tiles.product_tiles import MAX_ROWS, has_descriptors, has_warpgroups
from ingot.kernels.tiles.warpgroup_tiles import TILES
from ingot.kernels.weight.expand_int8 import whole_int8
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, as_int8, outputs_of

# Of products in e4m3 whose rows must be summed in one order beside any other rows.
INVARIANT_FP8_TILES = {
    "BLOCK_M": 64,
    "BLOCK_N": 128,
    "MORE_N": 0,
    "BLOCK_K": 128,
    "num_warps": 4,
    "num_stages": 4,
    "PIECES": 1,
    "PROGRAMS": 1,
    "OVERLAP": 1,
}


def int8_linear_reference(
    x: Int8Rows,
    weight: AnyInt8,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The PyTorch reference of :func:`int8_linear`."""
    y = int8_product(x, as_int8(weight), torch.float32, bias)
    y = (y if residual is None else y + residual).to(dtype)
    return y if out is None else out.copy_(y)


def int8_linear(
    x: Int8Rows,
    weight: AnyInt8,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """y = x W^T + bias + residual; sums of int8 are exact, so a row's result depends on that row alone.

    Args:
        x: [M, K] in 8 bits, int8 or e4m3, any M.
        weight: [N, K] in the same, or 4 bits inside 8, a constant, as in :func:`small_linear`; in blocks for
            rows in groups of 128.
        dtype: fp16, bf16 or fp32, of the result.
        bias: [N] or None, in ``dtype`` or fp32.
        residual: [M, N] or None, in ``dtype``; added after the bias.
        out: [M, N] contiguous, receives the result; may be ``residual``. None: a new tensor.
        tiles: for up to 64 rows as of :func:`small_linear`, with BLOCK_T of 8 and more; for more, or with
            BLOCK_M, as of ``large_int8_tiles`` (int8_tiles.py) or, on Hopper, ``warpgroup_tiles``.

    Returns:
        [M, N] in ``dtype``: ``out``, or a new tensor.
    """
    expect_product(x, weight)
    if dtype not in FLOAT_DTYPES:
        raise KernelArgumentError("the result has the wrong dtype", seen=dtype, allowed=FLOAT_DTYPES)
    shape = (x.values.shape[0], outputs_of(weight))
    if bias is not None:
        wanted = torch.float32 if bias.dtype == torch.float32 else dtype
        expect("bias", bias, shape[1:], like=x.values, dtype=wanted)
    if residual is not None:
        expect("residual", residual, shape, like=x.values, dtype=dtype)
    if out is not None:
        expect("out", out, shape, like=x.values, dtype=dtype)
        expect_contiguous("out", out)
    if not runs_on_gpu(x.values):
        return int8_linear_reference(x, weight, dtype, bias, residual, out)
    plain = residual is None and out is None and not tiles
    if plain and isinstance(weight, Int8Weight) and library_takes(x, weight, dtype, bias):
        return library_linear(x, weight, dtype, bias)
    if _by_warpgroups(x, weight, tiles):
        return warpgroup_matmul_triton(x, weight, dtype, bias, residual, out, tiles)
    if shape[0] <= MAX_ROWS and not (tiles and "BLOCK_M" in tiles):
        return small_int8_linear_triton(x, weight, dtype, bias, residual, out, tiles)
    return int8_matmul_triton(x, whole_int8(weight), dtype, bias, residual, out, tiles)


def _by_warpgroups(x: Int8Rows, weight: AnyInt8, tiles: Mapping[str, int] | None) -> bool:
    """Whether groups of warps multiply: more rows than the small kernels multiply, by 4 bits than they
    multiply as they are stored, any by a weight in blocks; not by other kernels' ``tiles``.
    """
    most = MAX_ROWS
    if isinstance(weight, Int4Weight):
        most = INT8_FRAGMENT_ROWS
    elif weight.in_blocks:
        most = 0
    if x.values.shape[0] <= most or (tiles and not tiles.keys() <= TILES):
        return False
    return has_warpgroups(x.values.device) and takes_warpgroups(x, weight)


def int8_linear_parts(
    x: Int8Rows, weight: AnyInt8, tiles: Mapping[str, int] | None = None
) -> Int8Sums | torch.Tensor:
    """x W^T as partial sums over the columns, which :func:`sum_norm` adds up.

    Args:
        x: [M, K] in 8 bits, M up to ``DECODE_ROWS``.
        weight: [N, K] in 8 bits, or 4 inside 8, a constant, as in :func:`small_linear`.
        tiles: as of :func:`int8_linear`, and ``SPLITS``; of rows with groups BLOCK_K is the group's. Those
            with BLOCK_M are of many rows, for int8 the default beyond ``FEW_PARTS`` rows where there are
            descriptors.

    Returns:
        The exact sums; of e4m3, and of rows with groups, [SPLITS, M, N] fp32, scaled. On the CPU one part.
    """
    expect_product(x, weight)
    expect_range("the number of rows", x.values.shape[0], 0, DECODE_ROWS)
    if not runs_on_gpu(x.values):
        weight = as_int8(weight)
        if x.group or x.values.dtype == E4M3:
            return int8_product(x, weight, torch.float32)[None]
        return Int8Sums(int8_sums(x.values, weight.values)[None], x.scales, weight.scales)
    if _by_warpgroups(x, weight, tiles):
        return warpgroup_parts_triton(x, weight, tiles)
    many = x.values.shape[0] > MAX_ROWS
    if tiles:
        many |= "BLOCK_M" in tiles
    elif x.values.shape[0] > FEW_PARTS and has_descriptors(x.values.device) and x.values.dtype != E4M3:
        many |= isinstance(weight, Int4Weight) or aligned(x, weight)
    if many:
        return int8_matmul_parts_triton(x, whole_int8(weight), tiles)
    return small_int8_parts_triton(x, weight, tiles)
