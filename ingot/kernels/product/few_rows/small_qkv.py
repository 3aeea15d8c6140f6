"""From hidden states to attention's input on a few rows, in one kernel: norm, QKV product, bias, rotary
embedding, logn scaling and the write into the paged KV cache; and the same of rows in 8 bits, without a norm.

Formulas are those of rms_norm.py and rope_kv_write.py; product plus bias is rounded to the dtype before the
rotation, as in two kernels. Norms of query and key heads are not supported.

    q = small_qkv(x, weight, bias, norm, 1e-6, place)      # a Placement
    q = small_int8_qkv(x8, weight, bias, place)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.cache.qkv_placement import Placement
from ingot.kernels.cache.rope_kv_write import rope_kv_write_reference
from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect,
    expect_float,
    expect_range,
    expect_rows,
    runs_on_gpu,
)
from ingot.kernels.product.few_rows.few_rows_kernels import few_qkv_kernel
from ingot.kernels.product.few_rows.resolved_launch import ResolvedLaunch, float_launch, int8_launch
from ingot.kernels.product.few_rows.small_int8 import int8_rows_argument, int8_weight_argument
from ingot.kernels.product.few_rows.small_linear import rows_argument, small_linear_reference
from ingot.kernels.product.product_arguments import HeadShape, expect_product, stored_argument
from ingot.kernels.rows.int8_rows import Int8Rows, int8_product
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.weight.int4_weight import AnyInt8, as_int8
from ingot.kernels.weight.stored_weight import AnyWeight, expect_weight, stored


def _op(place: Placement) -> tuple[str, int, int]:
    """The op of resolved_launch.py."""
    return "qkv", place.heads.head_dim, 2 * place.half


def _launch(
    x: tuple[Any, ...],
    weight: tuple[Any, ...],
    bias: torch.Tensor | None,
    q: torch.Tensor,
    place: Placement,
    launch: ResolvedLaunch,
) -> None:
    table, tokens, cache, (heads, kv_heads, head_dim, logn) = place
    strides = (None if table is None else table.stride(0), *cache.keys.stride()[:3])
    caches = (cache.keys, cache.values)
    few_qkv_kernel[launch.grid](
        x,
        weight,
        (bias, table, *tokens, *caches, q, *strides, *((1.0 / math.log(logn),) if logn else ())),
        SHAPE=HeadShape(heads, kv_heads, head_dim, place.half, cache.block_size, logn > 0),
        SHARE=launch.share,
        LOOP=launch.loop,
        **launch.options,
    )


def small_qkv_reference(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    place: Placement,
) -> torch.Tensor:
    """The PyTorch reference of :func:`small_qkv`."""
    qkv = small_linear_reference(x, weight, bias, None, norm_weight, norm_eps)
    return rope_kv_write_reference(qkv, place)


def _expect_place(place: Placement, rows: int, like: torch.Tensor) -> None:
    """Raise unless the product can place so many rows in a cache in the dtype of ``like``."""
    heads = place.heads
    heads.expect()
    expect_range("num_heads", heads.num_heads, 1)
    if heads.head_dim % 2:
        raise KernelArgumentError("head_dim must be even", seen=heads.head_dim)
    expect_range("the number of rows", rows, 0, MAX_ROWS)
    if place.cache.scales is not None:
        raise KernelArgumentError("the QKV product does not support a cache in 8 bits", seen="scales")
    place.expect(rows, like)


def small_qkv(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    place: Placement,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """QKV product of norm(x), then what :func:`rope_kv_write` does without head norms.

    Args:
        x: [M, K] fp16, bf16 or fp32, M up to 64.
        weight: [(num_heads + 2 num_kv_heads) head_dim, K], dtype of x: queries, keys, values.
        bias: [(num_heads + 2 num_kv_heads) head_dim] or None.
        norm_weight, norm_eps: as of :func:`small_linear`.
        place: with a cache in the dtype of x and an even head_dim.
        tiles: as of :func:`small_linear`; ``BLOCK_N`` counts both channels of a pair, at least 2.

    Returns:
        [M, num_heads, head_dim], dtype of x. How a row's bits depend on M: see :func:`small_linear`.
    """
    expect_rows("x", x)
    _expect_place(place, x.shape[0], like=x)
    outputs = place.heads.width
    weight = stored(weight)
    expect_weight(weight, x, outputs)
    if bias is not None:
        expect("bias", bias, (outputs,), like=x)
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (x.shape[1],), like=x)
    if not runs_on_gpu(x):
        return small_qkv_reference(x, weight, bias, norm_weight, norm_eps, place)
    launch, heads = float_launch(_op(place), x, weight, tiles), place.heads
    q = torch.empty((x.shape[0], heads.num_heads, heads.head_dim), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        rows = rows_argument(x, norm_weight, norm_eps, launch)
        _launch(rows, stored_argument(weight), bias, q, place, launch)
    return q


def small_int8_qkv_reference(
    x: Int8Rows, weight: AnyInt8, bias: torch.Tensor | None, place: Placement
) -> torch.Tensor:
    """The PyTorch reference of :func:`small_int8_qkv`."""
    qkv = int8_product(x, as_int8(weight), place.cache.keys.dtype, bias)
    return rope_kv_write_reference(qkv, place)


def small_int8_qkv(
    x: Int8Rows,
    weight: AnyInt8,
    bias: torch.Tensor | None,
    place: Placement,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """QKV product of rows in 8 bits, then what :func:`rope_kv_write` does without head norms.

    Args:
        x: [M, K] in 8 bits without groups, M up to 64.
        weight: [(num_heads + 2 num_kv_heads) head_dim, K] in 8 bits, or 4 inside 8, a constant, as in
            :func:`small_linear`.
        bias: [(num_heads + 2 num_kv_heads) head_dim] in the cache's dtype, or None.
        place: as of :func:`small_qkv`; the cache has the result's dtype.
        tiles: as of :func:`small_linear`; ``BLOCK_N`` counts both channels of a pair.

    Returns:
        [M, num_heads, head_dim], dtype of the cache.
    """
    if x.group:
        raise KernelArgumentError("the QKV product does not support rows with groups", seen=x.group)
    like, outputs = place.cache.keys, place.heads.width
    expect_float("key_cache", like)
    _expect_place(place, x.values.shape[0], like)
    expect_product(x, weight, outputs)
    if bias is not None:
        expect("bias", bias, (outputs,), like=like)
    if not runs_on_gpu(x.values):
        return small_int8_qkv_reference(x, weight, bias, place)
    launch = int8_launch(_op(place), x, weight, tiles)
    shape = (x.values.shape[0], place.heads.num_heads, place.heads.head_dim)
    q = torch.empty(shape, dtype=like.dtype, device=x.values.device)
    if shape[0]:
        _launch(int8_rows_argument(x), int8_weight_argument(weight, launch), bias, q, place, launch)
    return q
