"""From a few rows in 8 bits to attention's input: QKV product, bias, rotary embedding, logn scaling and the
write into the paged KV cache, in one kernel.

Owns the launch of qkv_matrix.py's kernel with numbers instead of floats. The product plus bias is rounded to
the dtype before the rotation, as in small_qkv.py. Knows no norm: it is in the rows already.

    q = small_int8_qkv(x8, weight, bias, table, rows, positions, slots, keys, values, 32, 8, 128)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton

from ingot.kernels.cache.rope_kv_write import expect_options, rope_kv_write_reference
from ingot.kernels.cache.scales import expect_cache
from ingot.kernels.checks import (
    KernelArgumentError,
    expect,
    expect_float,
    expect_group,
    expect_range,
    merge_tiles,
    runs_on_gpu,
)
from ingot.kernels.overlap import launch_options
from ingot.kernels.product.int8_checks import expect_product, scale_stride
from ingot.kernels.product.int8_fragments import int8_fragment_qkv_kernel
from ingot.kernels.product.qkv_matrix import small_qkv_matrix_kernel
from ingot.kernels.product.small_int8 import fragment_pointers, fragment_shape, int8_shape, settled
from ingot.kernels.product.small_product import MAX_ROWS, expect_rows
from ingot.kernels.product.small_qkv import pair_share
from ingot.kernels.rows.int8_rows import Int8Rows, int8_product
from ingot.kernels.tiles.int8_tiles import small_int8_tiles
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, as_int8


def small_int8_qkv_triton(
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
    """Launch the kernel; arguments as in :func:`small_int8_qkv`, unchecked."""
    (num_tokens, width), device = x.values.shape, x.values.device
    outputs = len(weight.scales)
    four_bits = isinstance(weight, Int4Weight)
    defaults = small_int8_tiles(num_tokens, outputs, width, device, four_bits=four_bits)
    choice = merge_tiles(defaults, tiles)
    pairs, half = choice["BLOCK_N"] // 2, 0 if cos_sin is None else cos_sin.shape[1] // 2
    if half not in (0, head_dim // 2) or head_dim // 2 % pairs:
        choice["FRAGMENTS"] = 0  # a tile's rows are two runs, half a head apart
    weight, choice = settled(x, weight, choice)
    expect_rows(choice, num_tokens)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=key_cache.dtype, device=device)
    if not num_tokens:
        return q
    heads = num_heads + 2 * num_kv_heads
    place = (cos_sin, rope_rows, positions, slot_mapping, q, key_cache, value_cache, num_tokens)
    strides = (x.values.stride(0), 0 if cos_sin is None else cos_sin.stride(0), *key_cache.stride()[:3])
    ends = (1.0 / math.log(logn_length) if logn_length else 0.0, x.scales, scale_stride(x))
    shape: dict[str, int] = {"HEADS": num_heads, "KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim}
    shape |= {"HALF": half, "BLOCK_SIZE": key_cache.shape[2], "LOGN": logn_length > 0}
    if isinstance(weight, Int4Weight):
        int8_fragment_qkv_kernel[(heads * (head_dim // 2 // pairs),)](
            *(x.values, *fragment_pointers(weight), bias, *place, *strides, *ends),
            **shape,
            **fragment_shape(choice, x, weight),
            **launch_options(choice, device),
        )
        return q
    share = pair_share(heads, head_dim, choice, device)
    small_qkv_matrix_kernel[(heads * triton.cdiv(head_dim // 2, share),)](
        *(x.values, weight.values, weight.values.stride(0), weight.scales, 0, None, bias),
        *(*place, *strides, *ends),
        **shape,
        SHARE=share,
        **int8_shape(choice, x),
        **launch_options(choice, device),
    )
    return q


def small_int8_qkv_reference(
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
) -> torch.Tensor:
    """The PyTorch twin; arguments as in :func:`small_int8_qkv`."""
    qkv = int8_product(x, as_int8(weight), key_cache.dtype, bias)
    arguments = (qkv, cos_sin, rope_rows, positions, slot_mapping, key_cache, value_cache)
    return rope_kv_write_reference(*arguments, num_heads, num_kv_heads, head_dim, logn_length=logn_length)


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
    expect_group(num_heads, num_kv_heads)
    expect_range("head_dim", head_dim, 2, 256)
    if head_dim % 2:
        raise KernelArgumentError("head_dim must be even", seen=head_dim)
    if x.group:
        raise KernelArgumentError("the QKV product does not support rows with groups", seen=x.group)
    outputs = (num_heads + 2 * num_kv_heads) * head_dim
    expect_product(x, weight, outputs)
    rows = x.values.shape[0]
    expect_range("the number of rows", rows, 0, MAX_ROWS)
    expect_float("key_cache", key_cache)
    if bias is not None:
        expect("bias", bias, (outputs,), like=key_cache)
    for name, indices in (("rope_rows", rope_rows), ("positions", positions), ("slot_mapping", slot_mapping)):
        expect(name, indices, (rows,), like=x.values, dtype=torch.int64)
    expect_cache(key_cache, value_cache, num_kv_heads, head_dim, like=key_cache)
    expect_options(key_cache, cos_sin, None, None, head_dim, logn_length)
    arguments = (x, weight, bias, cos_sin, rope_rows, positions, slot_mapping, key_cache, value_cache)
    options = (num_heads, num_kv_heads, head_dim, logn_length)
    if runs_on_gpu(x.values):
        return small_int8_qkv_triton(*arguments, *options, tiles)
    return small_int8_qkv_reference(*arguments, *options)
