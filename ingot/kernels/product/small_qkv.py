"""From hidden states to attention's input, on a few rows: norm, QKV product, bias, rotary embedding, logn
scaling and the write into the paged KV cache, in one kernel; and the same of rows in 8 bits, without a norm.

Owns the checks and the launch. The formulas are those of rms_norm.py and rope_kv_write.py; the product plus
bias is rounded to the dtype before the rotation, as when they are two kernels. Knows no model; norms of query
and key heads stay with rope_kv_write.

    q = small_qkv(x, weight, bias, norm, 1e-6, table, rows, positions, slots, keys, values, 32, 8, 128)
    q = small_int8_qkv(x8, weight, bias, table, rows, positions, slots, keys, values, 32, 8, 128)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ingot.kernels.cache.rope_kv_write import expect_options, rope_kv_write_reference
from ingot.kernels.cache.scales import expect_cache
from ingot.kernels.checks import (
    KernelArgumentError,
    expect,
    expect_float,
    expect_group,
    expect_range,
    runs_on_gpu,
)
from ingot.kernels.product.arguments import HeadShape, stored_argument
from ingot.kernels.product.few import few_qkv_kernel
from ingot.kernels.product.int8_checks import expect_product
from ingot.kernels.product.plans import Plan, float_plan, int8_plan
from ingot.kernels.product.small_int8 import int8_rows_argument, int8_weight_argument
from ingot.kernels.product.small_linear import rows_argument, small_linear_reference
from ingot.kernels.rows.int8_rows import Int8Rows, int8_product
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.weight.int4_weight import AnyInt8, as_int8
from ingot.kernels.weight.stored_weight import AnyWeight, expect_weight, stored


class Place(NamedTuple):
    """Where queries, keys and values go, and how they turn: arguments of ``small_qkv``."""

    cos_sin: torch.Tensor | None
    rope_rows: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    logn_length: int = 0

    @property
    def op(self) -> tuple[str, int, int]:
        """What a plan asks."""
        return "qkv", self.head_dim, 0 if self.cos_sin is None else self.cos_sin.shape[1]


def _launch(
    x: tuple[Any, ...],
    weight: tuple[Any, ...],
    bias: torch.Tensor | None,
    q: torch.Tensor,
    place: Place,
    plan: Plan,
) -> None:
    table, cache, logn = place.cos_sin, place.key_cache, place.logn_length
    strides = (None if table is None else table.stride(0), *cache.stride()[:3])
    half = 0 if table is None else table.shape[1] // 2
    few_qkv_kernel[plan.grid](
        x,
        weight,
        (bias, *place[:6], q, *strides, *((1.0 / math.log(logn),) if logn else ())),
        SHAPE=HeadShape(*place[6:9], half, cache.shape[2], logn > 0),
        SHARE=plan.share,
        LOOP=plan.loop,
        **plan.options,
    )


def small_qkv_triton(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    *placed: Any,
    tiles: Mapping[str, int] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`small_qkv`, unchecked."""
    weight, place = stored(weight), Place(*placed, **options)
    plan = float_plan(place.op, x, weight, tiles)
    q = torch.empty((x.shape[0], place.num_heads, place.head_dim), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        rows = rows_argument(x, norm_weight, norm_eps, plan)
        _launch(rows, stored_argument(weight), bias, q, place, plan)
    return q


def small_qkv_reference(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    *placed: Any,
    **options: Any,
) -> torch.Tensor:
    """The PyTorch twin; arguments as in :func:`small_qkv`."""
    place = Place(*placed, **options)
    qkv = small_linear_reference(x, weight, bias, None, norm_weight, norm_eps)
    return rope_kv_write_reference(qkv, *place[:-1], logn_length=place.logn_length)


def _expect_place(place: Place, x: torch.Tensor, like: torch.Tensor) -> int:
    """How many outputs the product has; caches are in the dtype of ``like``."""
    heads, kv_heads, head_dim = place.num_heads, place.num_kv_heads, place.head_dim
    expect_group(heads, kv_heads)
    expect_range("head_dim", head_dim, 2, 256)
    if head_dim % 2:
        raise KernelArgumentError("head_dim must be even", seen=head_dim)
    expect_range("the number of rows", x.shape[0], 0, MAX_ROWS)
    for name, indices in zip(Place._fields[1:4], place[1:4], strict=True):
        expect(name, indices, (x.shape[0],), like=x, dtype=torch.int64)
    expect_cache(place.key_cache, place.value_cache, kv_heads, head_dim, like=like)
    expect_options(like, place.cos_sin, None, None, head_dim, place.logn_length)
    return (heads + 2 * kv_heads) * head_dim


def small_qkv(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    cos_sin: torch.Tensor | None,
    rope_rows: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    logn_length: int = 0,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """QKV product of norm(x), then what :func:`rope_kv_write` does without head norms.

    Args:
        x: [M, K] fp16, bf16 or fp32, M up to 64.
        weight: [(num_heads + 2 num_kv_heads) head_dim, K], dtype of x: queries, keys, values.
        bias: [(num_heads + 2 num_kv_heads) head_dim] or None.
        norm_weight: [K] or None; with it norm is RMSNorm, rounded as in :func:`rms_norm`.
        norm_eps: added to the mean square.
        cos_sin: [rows, rotary_dim] fp32, cosines then sines, or None: no rotary embedding.
        rope_rows: [M] int64, row of cos_sin for each token.
        positions: [M] int64, 0-based position in the request; read for logn only.
        slot_mapping: [M] int64, ``block * block_size + offset``; -1 writes nothing.
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], dtype of x, changed in place.
        value_cache: as key_cache, and with the same strides.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: channels of a head, even, at most 256.
        logn_length: the trained length in tokens; 0: no logn scaling.
        tiles: as of :func:`small_linear`; ``BLOCK_N`` counts both channels of a pair, at least 2.

    Returns:
        [M, num_heads, head_dim], dtype of x. How a row's bits depend on M: see :func:`small_linear`.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_float("x", x)
    expect("x", x, (None, None), like=x)
    place = Place(cos_sin, rope_rows, positions, slot_mapping, key_cache, value_cache,
                  num_heads, num_kv_heads, head_dim, logn_length)  # fmt: skip
    outputs = _expect_place(place, x, like=x)
    weight = stored(weight)
    expect_weight(weight, x, outputs)
    if bias is not None:
        expect("bias", bias, (outputs,), like=x)
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (x.shape[1],), like=x)
    if runs_on_gpu(x):
        return small_qkv_triton(x, weight, bias, norm_weight, norm_eps, *place, tiles=tiles)
    return small_qkv_reference(x, weight, bias, norm_weight, norm_eps, *place)


def small_int8_qkv_triton(
    x: Int8Rows,
    weight: AnyInt8,
    bias: torch.Tensor | None,
    *placed: Any,
    tiles: Mapping[str, int] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`small_int8_qkv`, unchecked."""
    place = Place(*placed, **options)
    plan = int8_plan(place.op, x, weight, tiles)
    shape = (x.values.shape[0], place.num_heads, place.head_dim)
    q = torch.empty(shape, dtype=place.key_cache.dtype, device=x.values.device)
    if shape[0]:
        _launch(int8_rows_argument(x), int8_weight_argument(weight, plan), bias, q, place, plan)
    return q


def small_int8_qkv_reference(
    x: Int8Rows, weight: AnyInt8, bias: torch.Tensor | None, *placed: Any, **options: Any
) -> torch.Tensor:
    """The PyTorch twin; arguments as in :func:`small_int8_qkv`."""
    place = Place(*placed, **options)
    qkv = int8_product(x, as_int8(weight), place.key_cache.dtype, bias)
    return rope_kv_write_reference(qkv, *place[:-1], logn_length=place.logn_length)


def small_int8_qkv(
    x: Int8Rows,
    weight: AnyInt8,
    bias: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    rope_rows: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    logn_length: int = 0,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """QKV product of rows in 8 bits, then what :func:`rope_kv_write` does without head norms.

    Args:
        x: [M, K] in 8 bits without groups, M up to 64.
        weight: [(num_heads + 2 num_kv_heads) head_dim, K] in 8 bits, or 4 inside 8, a constant, as in
            :func:`small_linear`.
        bias: [(num_heads + 2 num_kv_heads) head_dim] in the caches' dtype, or None.
        key_cache, value_cache: in the dtype of the result; they and the others as of :func:`small_qkv`.
        tiles: as of :func:`small_linear`; ``BLOCK_N`` counts both channels of a pair.

    Returns:
        [M, num_heads, head_dim], dtype of the caches.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    if x.group:
        raise KernelArgumentError("the QKV product does not support rows with groups", seen=x.group)
    place = Place(cos_sin, rope_rows, positions, slot_mapping, key_cache, value_cache,
                  num_heads, num_kv_heads, head_dim, logn_length)  # fmt: skip
    expect_float("key_cache", key_cache)
    outputs = _expect_place(place, x.values, like=key_cache)
    expect_product(x, weight, outputs)
    if bias is not None:
        expect("bias", bias, (outputs,), like=key_cache)
    if runs_on_gpu(x.values):
        return small_int8_qkv_triton(x, weight, bias, *place, tiles=tiles)
    return small_int8_qkv_reference(x, weight, bias, *place)
