"""From hidden states to attention's input, on a few rows: norm, QKV product, bias, rotary embedding, logn
scaling and the write into the paged KV cache, in one kernel.

Owns how a program's weight rows pair up for the rotation. The formulas are those of rms_norm.py and
rope_kv_write.py; the product plus bias is rounded to the dtype before the rotation, as when they are two
kernels. Knows no model; norms of query and key heads stay with rope_kv_write.

    q = small_qkv(x, weight, bias, norm, 1e-6, table, rows, positions, slots, keys, values, 32, 8, 128)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.cache.rope_kv_write import expect_options, rope_kv_write_reference
from ingot.kernels.cache.scales import expect_cache
from ingot.kernels.checks import (
    KernelArgumentError,
    expect,
    expect_float,
    expect_group,
    expect_range,
    merge_tiles,
    multiprocessors,
    runs_on_gpu,
)
from ingot.kernels.norm.rms_norm import rms_norm_triton
from ingot.kernels.overlap import launch_options, start_next
from ingot.kernels.product.fragment_kernels import fragment_qkv
from ingot.kernels.product.matrix_product import matrix_shape, weight_pointers
from ingot.kernels.product.product_ends import split_pairs, turns
from ingot.kernels.product.qkv_matrix import small_qkv_matrix_kernel
from ingot.kernels.product.small_linear import small_linear_reference
from ingot.kernels.product.small_product import (
    MAX_ROWS,
    expect_rows,
    num_programs,
    prepare_rows,
    product_shape,
    product_tile,
    small_tiles,
)
from ingot.kernels.tiles.product_tiles import settled, whole_chunks
from ingot.kernels.weight.stored_weight import BLOCK_ROWS, AnyWeight, expect_weight, stored


@triton.jit
def _rows(
    tile: tl.tensor,
    LAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """The weight rows of a tile's pairs: their first channels, then their second ones."""
    PAIRS: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    index = tl.minimum(tile * PAIRS + lane % PAIRS, LAST)
    pair = index % (HEAD_DIM // 2)
    first = tl.where(pair < HALF, pair, pair + HALF)
    second = tl.where(pair < HALF, pair + HALF, pair + HEAD_DIM // 2)
    return index // (HEAD_DIM // 2) * HEAD_DIM + tl.where(lane < PAIRS, first, second)


@triton.jit
def _store_by_role(
    x: tl.tensor,
    heads: tl.tensor,
    channels: tl.tensor,
    inside: tl.tensor,
    token: tl.tensor,
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    cache_rows: tl.tensor,
    has_slot: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Store channels [P] of heads [P] for every token [T]: query output, key cache or value cache."""
    x = x.to(q_ptr.dtype.element_ty)
    is_q = inside & (heads < HEADS)[:, None]
    is_k = inside & ((heads >= HEADS) & (heads < HEADS + KV_HEADS))[:, None] & has_slot[None, :]
    is_v = inside & (heads >= HEADS + KV_HEADS)[:, None] & has_slot[None, :]
    q_places = token[None, :] * (HEADS * HEAD_DIM) + (heads * HEAD_DIM + channels)[:, None]
    tl.store(q_ptr + q_places, x, mask=is_q)
    keys = cache_rows[None, :] + ((heads - HEADS) * head_stride + channels)[:, None]
    tl.store(key_ptr + keys, x, mask=is_k)
    values = cache_rows[None, :] + ((heads - HEADS - KV_HEADS) * head_stride + channels)[:, None]
    tl.store(value_ptr + values, x, mask=is_v)


@triton.jit
def small_qkv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    tokens: tl.tensor,
    weight_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    norm_eps: tl.tensor,
    inverse_log: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOGN: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Tiles of BLOCK_N / 2 channel pairs of every row; a pair is what one angle rotates.

    Channels past the rotary ones pair up too; their angle is 0.
    """
    PAIRS: tl.constexpr = BLOCK_N // 2
    LAST: tl.constexpr = (HEADS + 2 * KV_HEADS) * (HEAD_DIM // 2) - 1
    TILES: tl.constexpr = LAST // PAIRS + 1
    token = tl.arange(0, 1)
    if OVERLAP == 2:
        start_next(OVERLAP)
    first, programs = tl.program_id(0), tl.num_programs(0)
    w, x, rstd = prepare_rows(x_ptr, weight_ptr, weight_stride,
                              _rows(first, LAST, HEAD_DIM, HALF, BLOCK_N), norm_ptr, norm_eps,
                              K, BLOCK_K, BLOCK_X, OVERLAP)  # fmt: skip
    for tile in tl.range(first, TILES, programs, num_stages=1):
        rows = _rows(tile, LAST, HEAD_DIM, HALF, BLOCK_N)
        next_rows = _rows(tile + programs, LAST, HEAD_DIM, HALF, BLOCK_N)
        index = tile * PAIRS + tl.arange(0, PAIRS)
        heads, pair = index // (HEAD_DIM // 2), index % (HEAD_DIM // 2)
        inside = (index <= LAST)[:, None] & (token < tokens)[None, :]
        # Asked for before the product, so that nothing waits for them after it.
        bias = tl.zeros([BLOCK_N, 1], dtype=tl.float32)
        if bias_ptr is not None:
            bias += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
        cos, sin, factor = turns(heads, pair, token, tokens, table_ptr, table_rows_ptr, positions_ptr,
                                  table_stride, inverse_log, HEADS, HALF, LOGN)  # fmt: skip
        slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
        block = slot // BLOCK_SIZE
        cache_rows = block * block_stride + (slot - block * BLOCK_SIZE) * token_stride
        has_next = tile + programs < TILES
        if OVERLAP == 4:  # noqa: SIM102 - one condition is known when compiling, the other is not
            if tile + programs >= TILES:
                start_next(OVERLAP)
        acc, w = product_tile(w, x, rstd, x_ptr, weight_ptr, weight_stride, rows, next_rows,
                              has_next, norm_ptr, K, BLOCK_N, BLOCK_K)  # fmt: skip
        a, b = split_pairs((acc + bias).to(q_ptr.dtype.element_ty).to(tl.float32), PAIRS, 1)
        is_v = (heads >= HEADS + KV_HEADS)[:, None]
        turned = tl.where(is_v, a, (a * cos - b * sin) * factor)
        b = tl.where(is_v, b, (b * cos + a * sin) * factor)
        a = turned
        first_channel = tl.where(pair < HALF, pair, pair + HALF)
        second_channel = tl.where(pair < HALF, pair + HALF, pair + HEAD_DIM // 2)
        _store_by_role(a, heads, first_channel, inside, token, q_ptr, key_ptr, value_ptr, cache_rows,
                       slot >= 0, head_stride, HEADS, KV_HEADS, HEAD_DIM)  # fmt: skip
        _store_by_role(b, heads, second_channel, inside, token, q_ptr, key_ptr, value_ptr, cache_rows,
                       slot >= 0, head_stride, HEADS, KV_HEADS, HEAD_DIM)  # fmt: skip


def pair_share(heads: int, head_dim: int, choice: Mapping[str, int], device: torch.device) -> int:
    """Channel pairs of a program: heads cut into as many equal parts as PROGRAMS a multiprocessor allow."""
    pairs, block = head_dim // 2, choice["BLOCK_N"] // 2
    if choice["PROGRAMS"] == 0:
        return block
    parts = max(choice["PROGRAMS"] * multiprocessors(device) // heads, triton.cdiv(pairs, block))
    return triton.cdiv(pairs, min(parts, pairs))


def small_qkv_triton(
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
    """Launch the kernel; arguments as in :func:`small_qkv`, unchecked."""
    weight, num_tokens = stored(weight), x.shape[0]
    turned = head_dim if cos_sin is None else cos_sin.shape[1]
    blocks = head_dim % (2 * BLOCK_ROWS) == 0 and turned == head_dim
    defaults = small_tiles(num_tokens, weight, x.element_size(), x.device, blocks)
    choice = settled(whole_chunks(merge_tiles(defaults, tiles), weight), pairs=True)
    expect_rows(choice, num_tokens)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return q
    places = (cos_sin, rope_rows, positions, slot_mapping, q, key_cache, value_cache, num_tokens)
    strides = (0 if cos_sin is None else cos_sin.stride(0), *key_cache.stride()[:3])
    inverse_log = 1.0 / math.log(logn_length) if logn_length else 0.0
    shape = {"HEADS": num_heads, "KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim,
             "HALF": 0 if cos_sin is None else cos_sin.shape[1] // 2, "BLOCK_SIZE": key_cache.shape[2],
             "LOGN": logn_length > 0}  # fmt: skip
    options = launch_options(choice, x.device)
    if choice["BLOCK_T"] > 1:
        if norm_weight is not None:
            x, _ = rms_norm_triton(x, norm_weight, norm_eps, tiles={"OVERLAP": min(choice["OVERLAP"], 2)})
        if choice["FRAGMENTS"]:
            fragment_qkv(x, weight, bias, places, (*strides, inverse_log), shape, choice)
            return q
        heads = num_heads + 2 * num_kv_heads
        share = pair_share(heads, head_dim, choice, x.device)
        grid = (heads * triton.cdiv(head_dim // 2, share),)
        small_qkv_matrix_kernel[grid](x, *weight_pointers(weight), bias, *places, x.stride(0), *strides,
                                      inverse_log, None, 0, SHARE=share, **shape,
                                      **matrix_shape(choice, weight), **options)  # fmt: skip
    else:
        tiles_to_do = triton.cdiv(weight.out_features // 2, choice["BLOCK_N"] // 2)
        grid = (num_programs(choice, tiles_to_do, x.device),)
        small_qkv_kernel[grid](x, weight.values, bias, norm_weight, *places, weight.values.stride(0),
                               *strides, norm_eps, inverse_log, **shape,
                               **product_shape(choice, weight), **options)  # fmt: skip
    return q


def small_qkv_reference(
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
) -> torch.Tensor:
    """The PyTorch twin; arguments as in :func:`small_qkv`."""
    qkv = small_linear_reference(x, weight, bias, None, norm_weight, norm_eps)
    arguments = (qkv, cos_sin, rope_rows, positions, slot_mapping, key_cache, value_cache)
    return rope_kv_write_reference(*arguments, num_heads, num_kv_heads, head_dim, logn_length=logn_length)


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
    expect_group(num_heads, num_kv_heads)
    expect_range("head_dim", head_dim, 2, 256)
    if head_dim % 2:
        raise KernelArgumentError("head_dim must be even", seen=head_dim)
    expect("x", x, (None, None), like=x)
    expect_range("the number of rows", x.shape[0], 0, MAX_ROWS)
    outputs = (num_heads + 2 * num_kv_heads) * head_dim
    weight = stored(weight)
    expect_weight(weight, x, outputs)
    if bias is not None:
        expect("bias", bias, (outputs,), like=x)
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (x.shape[1],), like=x)
    for name, indices in (("rope_rows", rope_rows), ("positions", positions), ("slot_mapping", slot_mapping)):
        expect(name, indices, (x.shape[0],), like=x, dtype=torch.int64)
    expect_cache(key_cache, value_cache, num_kv_heads, head_dim, like=x)
    expect_options(x, cos_sin, None, None, head_dim, logn_length)
    arguments = (x, weight, bias, norm_weight, norm_eps, cos_sin, rope_rows, positions, slot_mapping)
    options = (key_cache, value_cache, num_heads, num_kv_heads, head_dim, logn_length)
    if runs_on_gpu(x):
        return small_qkv_triton(*arguments, *options, tiles)
    return small_qkv_reference(*arguments, *options)
