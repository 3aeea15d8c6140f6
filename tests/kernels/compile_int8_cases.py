"""Launchers of kernels that begin or end in 8 bits on meta tensors, as in compile_cases.py.

INT8_CASES["both in 8 bits 16 bf16"]()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.product_candidates import MOST_GROUP_RESULTS, tried
from ingot.kernels.activation.silu_mul_int8 import quantized, silu_mul_int8
from ingot.kernels.norm.layer_norm import layer_norm
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.few_rows.small_int8 import small_int8_linear_triton, small_int8_parts_triton
from ingot.kernels.product.int8.int8_matmul import int8_matmul_parts_triton, int8_matmul_triton
from ingot.kernels.product.int8.warpgroup_matmul import warpgroup_matmul_triton, warpgroup_parts_triton
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, Int8Weight
from ingot.kernels.rows.row_endings import InInt8
from ingot.kernels.tiles.int8_tiles import LARGE_NAMES, Machine
from ingot.kernels.tiles.warpgroup_tiles import rated
from ingot.kernels.weight.int4_weight import Int4Weight
from tests.kernels.compile_cases import BRAIN, FULL, HALF, empty
from tests.kernels.flat_calls import small_int8_qkv_triton, small_qkv_triton
from tests.kernels.numerics import launched

PARTS_128, PARTS_256 = (128, 128, 0, 128, 8, 4, 1, 0), (128, 256, 0, 128, 8, 4, 2, 0)
HOPPER = Machine(132, True, True, 227 << 10)
EARLY_PARTS = {"TMA": 2, "SPLITS": 4, "OVERLAP": 2}


def rows_in_8(rows: int, width: int, group: int = 0) -> Int8Rows:
    """Empty activations in 8 bits."""
    scales = (rows, width // group) if group else (rows,)
    return Int8Rows(empty(rows, width, dtype=torch.int8), empty(*scales, dtype=FULL), group)


def weight_in_8(outputs: int, width: int) -> Int8Weight:
    """An empty weight for activations in 8 bits."""
    return Int8Weight(empty(outputs, width, dtype=torch.int8), empty(outputs, dtype=FULL))


def int8_ends(dtype: torch.dtype, rows: int, **tiles: int) -> None:
    """Every kernel that ends in 8 bits."""
    x, norm = empty(rows, 4096, dtype=dtype), empty(4096, dtype=dtype)
    static = empty(1, dtype=FULL)
    launched(rms_norm)(x, norm, 1e-6, x, tiles, InInt8())
    launched(rms_norm)(x, norm, 1e-6, x, tiles, InInt8(static))
    launched(silu_mul_int8)(empty(rows, 22016, dtype=dtype), None, tiles)
    launched(quantized)(x, 128, None, tiles)
    launched(quantized)(x, 0, None, tiles, "gelu")
    launched(quantized)(x, 0, static, tiles, "gelu_tanh")
    parts, parts8 = empty(4, rows, 4096, dtype=FULL), empty(4, rows, 4096, dtype=torch.int32)
    launched(sum_norm)(parts, x, norm, 1e-6, norm, tiles, InInt8())
    sums = Int8Sums(parts8, empty(rows, dtype=FULL), empty(4096, dtype=FULL))
    launched(sum_norm)(sums, x, norm, 1e-6, None, tiles, InInt8())
    launched(sum_norm)(sums, x, norm, 1e-6, None, tiles)
    launched(sum_norm)(sums, x, norm, 1e-6, norm, tiles, InInt8(), norm)
    launched(layer_norm)(x, norm, norm, 1e-6, x, tiles, InInt8())


def head_places(dtype: torch.dtype, rows: int) -> tuple[Any, ...]:
    """Where a QKV product puts 32 heads of 128, from the rotary table on."""
    index, cache = empty(rows, dtype=torch.int64), empty(100, 32, 64, 128, dtype=dtype)
    return (empty(100, 128, dtype=FULL), index, index, index, cache, cache, 32, 32, 128)


def small_int8(dtype: torch.dtype, rows: int, **tiles: int) -> None:
    """Every product of a few rows in 8 bits."""
    x = rows_in_8(rows, 4096)
    small_int8_qkv_triton(x, weight_in_8(12288, 4096), None, *head_places(dtype, rows), tiles=tiles)
    small_int8_linear_triton(x, weight_in_8(22016, 4096), dtype, empty(22016, dtype=dtype), None, None, tiles)
    small_int8_parts_triton(rows_in_8(rows, 11008), weight_in_8(4096, 11008), tiles)
    small_int8_parts_triton(rows_in_8(rows, 4096, 128), weight_in_8(4096, 4096), tiles)


def plain_layer(dtype: torch.dtype, rows: int) -> None:
    """What a decode step of a layer with LayerNorm, biases and a plain MLP launches (Whisper large)."""
    index, cache = empty(rows, dtype=torch.int64), empty(100, 20, 64, 64, dtype=dtype)
    place = (None, index, index, index, cache, cache, 20, 20, 64)
    x, vector, early = empty(rows, 1280, dtype=dtype), empty(1280, dtype=dtype), {"OVERLAP": 2}
    biases = empty(3840, dtype=dtype)
    small_qkv_triton(x, empty(3840, 1280, dtype=dtype), biases, None, 0.0, *place, tiles=early)
    parts = empty(2, rows, 1280, dtype=FULL)
    launched(sum_norm)(parts, x, vector, 1e-5, vector, early, shift=vector)
    small_int8_qkv_triton(rows_in_8(rows, 1280), weight_in_8(3840, 1280), biases, *place, tiles=early)
    small_int8_parts_triton(rows_in_8(rows, 1280, 64), weight_in_8(1280, 1280), early)
    launched(quantized)(empty(rows, 5120, dtype=dtype), 0, None, early, "gelu")
    launched(quantized)(x, 64, None, early)


def pairs_in_8(outputs: int, width: int, group: int) -> Int4Weight:
    """A weight of 4 bits inside 8."""
    levels = empty(2, width // group, outputs, dtype=torch.uint8)
    pairs, scales = empty(outputs, width // 2, dtype=torch.uint8), empty(outputs, dtype=FULL)
    return Int4Weight(pairs, *levels, scales, group, width)


def four_bits(dtype: torch.dtype, rows: int, **tiles: int) -> None:
    """Products of a few rows with a weight of 4 bits inside 8."""
    small_int8_qkv_triton(
        rows_in_8(rows, 4096), pairs_in_8(12288, 4096, 128), None, *head_places(dtype, rows), tiles=tiles
    )
    for weight in (pairs_in_8(22016, 4096, 128), pairs_in_8(4096, 11008, 64)):
        x = rows_in_8(rows, weight.in_features)
        small_int8_linear_triton(x, weight, dtype, None, None, None, tiles)
        small_int8_parts_triton(x, weight, tiles)
    small_int8_parts_triton(rows_in_8(rows, 4096, 128), pairs_in_8(4096, 4096, 128), tiles)


def large_int8(dtype: torch.dtype, rows: int, width: int = 4096, group: int = 128, **tiles: int) -> None:
    """Products of many rows in 8 bits: with a bias, with a residual sum, of groups."""
    x, stream = rows_in_8(rows, width), empty(rows, 4096, dtype=dtype)
    bias = empty(22016, dtype=dtype)
    int8_matmul_triton(x, weight_in_8(22016, width), dtype, bias, None, None, tiles)
    int8_matmul_triton(x, weight_in_8(4096, width), dtype, None, stream, stream, tiles)
    int8_matmul_triton(
        rows_in_8(rows, width, group), weight_in_8(4096, width), dtype, None, stream, None, tiles
    )


def large_int8_parts(rows: int, shape: tuple[int, ...], group: int = 0, **tiles: int) -> None:
    """Parts of the sums of many rows in 8 bits, by tiles of this shape, and their end."""
    width = 4096 if group else 11008
    tiles |= dict(zip(LARGE_NAMES, shape, strict=True))
    parts = int8_matmul_parts_triton(rows_in_8(rows, width, group), weight_in_8(4096, width), tiles)
    x, norm = empty(rows, 4096), empty(4096)
    launched(sum_norm)(parts, x, norm, 1e-6, None, {"OVERLAP": tiles.get("OVERLAP", 1)}, InInt8())


def int8_sums_of(rows: int) -> None:
    """Exact sums of many rows, by the tiles of the largest result."""
    int8_matmul_triton(rows_in_8(rows, 4096), weight_in_8(12288, 4096), torch.int32, tiles={"TMA": 2})


def warpgroups(rows: int, group: int = 0, four: bool = False) -> None:
    """Products by groups of warps, by every choice for so many rows: with bias and residual sum, in parts."""
    weight = pairs_in_8(4096, 4096, 128) if four else weight_in_8(4096, 4096)
    x, stream, bias = rows_in_8(rows, 4096, group), empty(rows, 4096, dtype=BRAIN), empty(4096, dtype=BRAIN)
    for _, tiles in rated(rows, 2, HOPPER, group, four):
        warpgroup_matmul_triton(x, weight, BRAIN, bias, stream, stream, tiles)
    for _, tiles in rated(rows, 4, HOPPER, group, four):
        warpgroup_parts_triton(x, weight, tiles | {"SPLITS": 2})


INT8_CASES: dict[str, Callable[[], Any]] = {
    "ends in 8 bits fp16": lambda: int8_ends(HALF, 4),
    "ends in 8 bits fp32": lambda: int8_ends(FULL, 4),
    "both in 8 bits 1 fp16": lambda: small_int8(HALF, 1),
    "both in 8 bits 16 bf16": lambda: small_int8(BRAIN, 16),
    "both in 8 bits 64 fp32": lambda: small_int8(FULL, 64),
    "straight, 4 bits inside 8 8 fp16": lambda: four_bits(HALF, 8),
    "straight, 4 bits inside 8 16 bf16": lambda: four_bits(BRAIN, 16),
    "both in 8 bits 2048 fp16 by pointers": lambda: large_int8(HALF, 2048, TMA=1, num_stages=2),
    "both in 8 bits 70 bf16 odd": lambda: large_int8(BRAIN, 70, 172, 43, TMA=1, num_stages=2),
    "parts in 8 bits 128 by pointers": lambda: large_int8_parts(128, PARTS_128, TMA=1, SPLITS=4),
    "parts in 8 bits 128 by heads, by pointers": lambda: large_int8_parts(
        128, PARTS_128, 128, TMA=1, SPLITS=4
    ),
}


INT8_OVERLAPPING: dict[str, Callable[[], Any]] = {  # sm_90 and later
    "ends in 8 bits bf16 overlapping": lambda: int8_ends(BRAIN, 4, OVERLAP=2),
    "both in 8 bits 1 fp16 overlapping": lambda: small_int8(HALF, 1, OVERLAP=2),
    "both in 8 bits 8 fp16 overlapping": lambda: small_int8(HALF, 8, OVERLAP=2),
    "a plain layer 1 fp16": lambda: plain_layer(HALF, 1),
    "a plain layer 8 bf16": lambda: plain_layer(BRAIN, 8),
    "straight, 4 bits inside 8 8 fp16 overlapping": lambda: four_bits(HALF, 8, OVERLAP=2),
    "both in 8 bits 32 fp16 overlapping": lambda: small_int8(HALF, 32, OVERLAP=2),
    "both in 8 bits 64 bf16 overlapping": lambda: small_int8(BRAIN, 64, OVERLAP=2),
    "both in 8 bits 32 by groups of warps": lambda: warpgroups(32, four=True),
    "both in 8 bits 64 by groups of warps": lambda: warpgroups(64, four=True),
    "both in 8 bits 128 by groups of warps": lambda: [warpgroups(128), warpgroups(128, four=True)],
    "both in 8 bits 256 by groups of warps": lambda: warpgroups(256),
    "both in 8 bits 2048 by groups of warps": lambda: [warpgroups(2048), warpgroups(2048, four=True)],
    "both in 8 bits 128 by heads, by groups of warps": lambda: [
        warpgroups(rows, 128, four=True) for rows in (32, 64, 128)
    ],
    "both in 8 bits 2048 fp16": lambda: large_int8(HALF, 2048, TMA=2),
    "both in 8 bits 2048 fp32": lambda: large_int8(FULL, 2048, TMA=2),
    "both in 8 bits 2048 sums": lambda: int8_sums_of(2048),
    "both in 8 bits 256 bf16": lambda: large_int8(BRAIN, 256, TMA=2),
    "both in 8 bits 128 fp16 one program a tile": lambda: large_int8(HALF, 128, TMA=2, PROGRAMS=0),
    "both in 8 bits 128 fp16 overlapping": lambda: large_int8(HALF, 128, TMA=2, OVERLAP=2),
    "both in 8 bits 256 bf16 walking, overlapping": lambda: large_int8(
        BRAIN, 256, TMA=2, OVERLAP=2, PROGRAMS=1
    ),
    "parts in 8 bits 128 overlapping": lambda: large_int8_parts(128, PARTS_128, **EARLY_PARTS),
    "parts in 8 bits 128 by heads overlapping": lambda: large_int8_parts(128, PARTS_128, 128, **EARLY_PARTS),
    "parts in 8 bits 256 overlapping": lambda: large_int8_parts(256, PARTS_256, **EARLY_PARTS),
    "parts in 8 bits 128 two beside": lambda: [
        large_int8_parts(128, shape, group, **EARLY_PARTS)
        for shape in (tuple(tiles.values()) for tiles in tried("try_large_int8"))
        for group in (0, 128)
        if shape[0] * shape[1] <= MOST_GROUP_RESULTS
    ],
}
