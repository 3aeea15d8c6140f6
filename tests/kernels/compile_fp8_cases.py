"""Launchers of kernels that begin or end in e4m3 on meta tensors, as in compile_cases.py.

FP8_CASES["both in fp8 16 bf16"]()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.kernels.activation.silu_mul_int8 import quantized, silu_mul_int8
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.few_rows.small_int8 import small_int8_linear_triton, small_int8_parts_triton
from ingot.kernels.product.int8.int8_matmul import int8_matmul_parts_triton, int8_matmul_triton
from ingot.kernels.product.int8.warpgroup_matmul import warpgroup_matmul_triton, warpgroup_parts_triton
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Weight
from ingot.kernels.rows.row_endings import InInt8
from ingot.kernels.tiles.warpgroup_tiles import rated
from tests.kernels.compile_cases import BRAIN, FULL, HALF, empty
from tests.kernels.compile_int8_cases import HOPPER, head_places
from tests.kernels.flat_calls import small_int8_qkv_triton
from tests.kernels.numerics import launched


def fp8_rows(rows: int, width: int, group: int = 0) -> Int8Rows:
    """Empty activations in e4m3."""
    scales = (rows, width // group) if group else (rows,)
    return Int8Rows(empty(rows, width, dtype=E4M3), empty(*scales, dtype=FULL), group)


def fp8_weight(outputs: int, width: int) -> Int8Weight:
    """An empty weight in e4m3."""
    return Int8Weight(empty(outputs, width, dtype=E4M3), empty(outputs, dtype=FULL))


def fp8_blocks(outputs: int, width: int) -> Int8Weight:
    """An empty weight in e4m3 with a scale per block of 128 x 128."""
    scales = empty(-(-outputs // 128), width // 128, dtype=FULL)
    return Int8Weight(empty(outputs, width, dtype=E4M3), scales)


def fp8_ends(dtype: torch.dtype, rows: int, **tiles: int) -> None:
    """Every kernel that ends in e4m3."""
    x, norm = empty(rows, 4096, dtype=dtype), empty(4096, dtype=dtype)
    launched(rms_norm)(x, norm, 1e-6, x, tiles, InInt8(dtype=E4M3))
    launched(silu_mul_int8)(empty(rows, 22016, dtype=dtype), None, tiles, dtype=E4M3)
    launched(quantized)(x, 128, None, tiles, dtype=E4M3)
    launched(quantized)(x, 0, None, tiles, dtype=E4M3)
    launched(rms_norm)(x, norm, 1e-6, x, tiles, InInt8(dtype=E4M3, group=128))
    launched(silu_mul_int8)(empty(rows, 22016, dtype=dtype), None, tiles, dtype=E4M3, group=128)
    parts = empty(4, rows, 4096, dtype=FULL)
    launched(sum_norm)(parts, x, norm, 1e-6, norm, tiles, InInt8(dtype=E4M3))


def small_fp8(dtype: torch.dtype, rows: int, **tiles: int) -> None:
    """Every product of a few rows in e4m3."""
    x, weight = fp8_rows(rows, 4096), fp8_weight(12288, 4096)
    small_int8_qkv_triton(x, weight, None, *head_places(dtype, rows), tiles=tiles)
    small_int8_linear_triton(x, fp8_weight(22016, 4096), dtype, empty(22016, dtype=dtype), None, None, tiles)
    small_int8_parts_triton(fp8_rows(rows, 11008), fp8_weight(4096, 11008), tiles)
    groups = fp8_rows(rows, 4096, 128)
    small_int8_parts_triton(groups, fp8_weight(4096, 4096), tiles)
    small_int8_parts_triton(groups, fp8_blocks(4096, 4096), tiles)
    small_int8_linear_triton(groups, fp8_blocks(22016, 4096), dtype, None, None, None, tiles)


def large_fp8(dtype: torch.dtype, rows: int, **tiles: int) -> None:
    """Products of many rows in e4m3: with a bias, with a residual sum, of groups, in parts."""
    x, stream, bias = fp8_rows(rows, 4096), empty(rows, 4096, dtype=dtype), empty(22016, dtype=dtype)
    int8_matmul_triton(x, fp8_weight(22016, 4096), dtype, bias, None, None, tiles)
    int8_matmul_triton(x, fp8_weight(4096, 4096), dtype, None, stream, stream, tiles)
    groups = fp8_rows(rows, 4096, 128)
    int8_matmul_triton(groups, fp8_weight(4096, 4096), dtype, None, stream, None, tiles)
    int8_matmul_triton(groups, fp8_blocks(4096, 4096), dtype, None, stream, None, tiles)
    if rows <= 256:
        int8_matmul_parts_triton(fp8_rows(rows, 11008), fp8_weight(4096, 11008), tiles)
        int8_matmul_parts_triton(groups, fp8_weight(4096, 4096), tiles)
        int8_matmul_parts_triton(groups, fp8_blocks(4096, 4096), tiles)


def blocks_by_warpgroups(rows: int) -> None:
    """Products in blocks by groups of warps, by every choice for so many rows."""
    x, weight, bias = fp8_rows(rows, 4096, 128), fp8_blocks(4096, 4096), empty(4096, dtype=BRAIN)
    stream = empty(rows, 4096, dtype=BRAIN)
    for _, tiles in rated(rows, 2, HOPPER, 128):
        warpgroup_matmul_triton(x, weight, BRAIN, None, None, None, tiles)
    warpgroup_matmul_triton(x, weight, BRAIN, bias, stream, stream, tiles)
    for _, tiles in rated(rows, 4, HOPPER, 128, split=True):
        warpgroup_parts_triton(x, weight, tiles | {"SPLITS": 2})


FP8_CASES: dict[str, Callable[[], Any]] = {  # compute capability 8.9 and later
    "fp8 ends bf16": lambda: fp8_ends(BRAIN, 4),
    "fp8 both 1 fp16": lambda: small_fp8(HALF, 1),
    "fp8 both 16 bf16": lambda: small_fp8(BRAIN, 16),
    "fp8 both 64 fp16": lambda: small_fp8(HALF, 64),
    "fp8 both 2048 fp16 by pointers": lambda: large_fp8(HALF, 2048, TMA=1, num_stages=2),
}
FP8_OVERLAPPING: dict[str, Callable[[], Any]] = {  # sm_90 and later
    "fp8 ends bf16 overlapping": lambda: fp8_ends(BRAIN, 4, OVERLAP=2),
    "fp8 both 1 bf16 overlapping": lambda: small_fp8(BRAIN, 1, OVERLAP=2),
    "fp8 both 64 bf16 overlapping": lambda: small_fp8(BRAIN, 64, OVERLAP=2),
    "fp8 both 4096 bf16": lambda: large_fp8(BRAIN, 4096, TMA=2),
    "fp8 blocks 8 by groups of warps": lambda: blocks_by_warpgroups(8),
    "fp8 blocks 64 by groups of warps": lambda: blocks_by_warpgroups(64),
    "fp8 both 256 bf16 overlapping": lambda: large_fp8(BRAIN, 256, TMA=2, OVERLAP=2),
}
