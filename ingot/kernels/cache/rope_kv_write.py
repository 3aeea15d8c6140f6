"""Between the QKV product and attention: head norms, rotary embedding, the write into the paged KV cache.

per head (Qwen3):    x = cast(x / sqrt(mean(x^2) + eps)) * weight
per head (Gemma-3):  the same with one cast, after the weight: where weights are fp32 beside 16-bit heads
rotary, half split:  x[i], x[i+r] = x[i] cos_i - x[i+r] sin_i, x[i+r] cos_i + x[i] sin_i   for i < r
logn (Qwen v1):      q = q * max(1, log(position + 1) / log(logn_length))

q = rope_kv_write(qkv, Placement(table, TokenPlaces(rows, positions, slots), cache, QkvHeads(32, 8, 128)))
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.cache.cache_scales import write_tokens
from ingot.kernels.cache.cached_heads import QkvParts, Roles, head_columns, largest, normed, store_heads
from ingot.kernels.cache.qkv_placement import HeadNorms, Placement
from ingot.kernels.kernel_checks import expect, expect_float, merge_tiles, next_power_of_two, runs_on_gpu
from ingot.kernels.launch_overlap import launch_options, other_overlap, start_next, wait_for_previous
from ingot.kernels.rows.int8_round import scale_of


@triton.jit
def rope_kv_write_kernel(
    qkv_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    part_stride: tl.tensor,
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
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    LOGN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program per BLOCK_HEADS heads of a token; a head is two rotary halves and an unchanged tail.

    With scales keys and values are rounded to the dtype, then stored in 8 bits. With PARTS ``qkv`` is partial
    sums, to which ``bias`` is added.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    real = heads < HEADS + 2 * KV_HEADS
    is_q = heads < HEADS
    is_v = heads >= HEADS + KV_HEADS
    base = qkv_ptr + token * qkv_stride + (heads * HEAD_DIM)[:, None]
    bias = None if bias_ptr is None else bias_ptr + (heads * HEAD_DIM)[:, None]
    half_cols = tl.arange(0, BLOCK_HALF)
    in_half = half_cols < HALF
    tail_cols = 2 * HALF + tl.arange(0, BLOCK_TAIL)
    in_tail = tail_cols < HEAD_DIM
    slot = tl.load(slots_ptr + token)

    squares = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    if HALF > 0:
        half_mask = real[:, None] & in_half[None, :]
        first = head_columns(base, bias, part_stride, half_cols, half_mask, dtype, PARTS)
        second = head_columns(base, bias, part_stride, HALF + half_cols, half_mask, dtype, PARTS)
        squares += tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if 2 * HALF < HEAD_DIM:
        tail_mask = real[:, None] & in_tail[None, :]
        tail = head_columns(base, bias, part_stride, tail_cols, tail_mask, dtype, PARTS)
        squares += tl.sum(tail * tail, axis=1)

    factor = tl.full([BLOCK_HEADS], 1.0, dtype=tl.float32)
    if LOGN:
        position = tl.load(positions_ptr + token).to(tl.float32)
        factor = tl.where(is_q, tl.maximum(tl.log(position + 1.0) * inverse_log, 1.0), 1.0)
    block = slot // BLOCK_SIZE
    offset = block * block_stride + (slot - block * BLOCK_SIZE) * token_stride
    has_slot = slot + heads * 0 >= 0  # per head: a scalar condition would widen the masks to integers
    rstd = tl.rsqrt(squares / HEAD_DIM + norm_eps)

    if HALF > 0:
        if q_norm_ptr is not None:
            first = normed(first, rstd, q_norm_ptr, k_norm_ptr, half_cols, in_half, is_q, is_v, dtype)
            second_cols = HALF + half_cols
            second = normed(second, rstd, q_norm_ptr, k_norm_ptr, second_cols, in_half, is_q, is_v, dtype)
        row = tl.load(rows_ptr + token) * table_stride
        cos = tl.load(table_ptr + row + half_cols, mask=in_half, other=1.0)[None, :]
        sin = tl.load(table_ptr + row + HALF + half_cols, mask=in_half, other=0.0)[None, :]
        turned_first = (first * cos - second * sin) * factor[:, None]
        turned_second = (second * cos + first * sin) * factor[:, None]
        turned_first = tl.where(is_v[:, None], first, turned_first)
        turned_second = tl.where(is_v[:, None], second, turned_second)
    if 2 * HALF < HEAD_DIM:
        if q_norm_ptr is not None:
            tail = normed(tail, rstd, q_norm_ptr, k_norm_ptr, tail_cols, in_tail, is_q, is_v, dtype)
        tail = tail * factor[:, None]

    NARROW: tl.constexpr = key_scale_ptr is not None
    is_k = (heads >= HEADS) & (heads < HEADS + KV_HEADS)
    stored = Roles(is_q[:, None], (is_k & has_slot)[:, None], (is_v & real & has_slot)[:, None])
    inverse = squares
    if NARROW:
        most = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
        if HALF > 0:
            most = tl.maximum(largest(turned_first, dtype), largest(turned_second, dtype))
        if 2 * HALF < HEAD_DIM:
            most = tl.maximum(most, largest(tail, dtype))
        scale, inverse = scale_of(most, key_ptr.dtype.element_ty)
        # Scales have the caches' shape without the channels.
        row = offset // HEAD_DIM + (heads - HEADS) % KV_HEADS * (head_stride // HEAD_DIM)
        tl.store(key_scale_ptr + row, scale, mask=is_k & has_slot)
        tl.store(value_scale_ptr + row, scale, mask=is_v & real & has_slot)
    places = Roles(
        q_ptr + token * (HEADS * HEAD_DIM) + (heads * HEAD_DIM)[:, None],
        key_ptr + offset + ((heads - HEADS) * head_stride)[:, None],
        value_ptr + offset + ((heads - HEADS - KV_HEADS) * head_stride)[:, None],
    )
    if HALF > 0:
        store_heads(turned_first, half_cols, in_half, places, stored, inverse, NARROW)
        store_heads(turned_second, HALF + half_cols, in_half, places, stored, inverse, NARROW)
    if 2 * HALF < HEAD_DIM:
        store_heads(tail, tail_cols, in_tail, places, stored, inverse, NARROW)


def default_tiles() -> dict[str, int]:
    """Tile choices for an H200: 8 heads of 128 channels give 2 warps 16-byte loads."""
    return {"BLOCK_HEADS": 8, "num_warps": 2, "OVERLAP": 1}


def candidate_tiles(device: torch.device | None = None) -> list[dict[str, int]]:
    """Tile choices worth measuring, the default first."""
    default = default_tiles()
    changes = [{"BLOCK_HEADS": 4}, {"BLOCK_HEADS": 16, "num_warps": 4}]
    return [default, *({**default, **change} for change in [*changes, *other_overlap(device)])]


def _launch(
    qkv: torch.Tensor | QkvParts, place: Placement, norms: HeadNorms | None, tiles: Mapping[str, int] | None
) -> torch.Tensor:
    choice = merge_tiles(default_tiles(), tiles)
    split = isinstance(qkv, QkvParts)
    source, bias = (qkv.parts, qkv.bias) if isinstance(qkv, QkvParts) else (qkv, None)
    cos_sin, tokens, cache, (num_heads, num_kv_heads, head_dim, logn_length) = place
    q_norm, k_norm, norm_eps = (None, None, 0.0) if norms is None else norms
    num_tokens, half = source.shape[-2], place.half
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=source.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, choice["BLOCK_HEADS"]))
        rope_kv_write_kernel[grid](
            source, bias, cos_sin, *tokens, q, *cache.pointers, q_norm, k_norm,
            source.stride(-2), source.stride(0) if split else 0, 0 if cos_sin is None else cos_sin.stride(0),
            *cache.keys.stride()[:3], norm_eps, 1.0 / math.log(logn_length) if logn_length else 0.0,
            HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=half,
            BLOCK_HALF=next_power_of_two(half), BLOCK_TAIL=next_power_of_two(head_dim - 2 * half),
            BLOCK_SIZE=cache.block_size, BLOCK_HEADS=choice["BLOCK_HEADS"],
            PARTS=source.shape[0] if split else 0, LOGN=logn_length > 0, OVERLAP=choice["OVERLAP"],
            **launch_options(choice, source.device),
        )  # fmt: skip
    return q


def _reference_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def _reference_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, tail = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, rotary_dim / 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, tail), dim=-1)


def rope_kv_write_reference(
    qkv: torch.Tensor | QkvParts, place: Placement, norms: HeadNorms | None = None
) -> torch.Tensor:
    """The PyTorch reference of :func:`rope_kv_write`."""
    cos_sin, (rope_rows, positions, slot_mapping), cache, (num_heads, num_kv_heads, head_dim, logn) = place
    qkv = qkv.product() if isinstance(qkv, QkvParts) else qkv
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    last = num_heads + num_kv_heads
    q, k, v = heads[:, :num_heads], heads[:, num_heads:last], heads[:, last:]  # each [T, heads, D]
    if norms is not None:
        q, k = _reference_norm(q, norms.q, norms.eps), _reference_norm(k, norms.k, norms.eps)
    if cos_sin is not None:
        cos, sin = cos_sin[rope_rows].chunk(2, dim=-1)
        q, k = _reference_rotary(q, cos, sin), _reference_rotary(k, cos, sin)
    if logn:
        factor = torch.log(positions.float() + 1.0) * (1.0 / math.log(logn))
        q = q.float() * factor.clamp(min=1.0)[:, None, None]
    k = k.to(qkv.dtype)
    keys, values, key_scales, value_scales = cache.pointers
    if len(slot_mapping) == 1 and key_scales is None:  # a decode step of one request
        block, offset = divmod(int(slot_mapping), cache.block_size)
        if block >= 0:
            keys[block, :, offset], values[block, :, offset] = k[0], v[0]
        return q.to(qkv.dtype).contiguous()
    written = slot_mapping >= 0
    blocks, offsets = slot_mapping[written] // cache.block_size, slot_mapping[written] % cache.block_size
    write_tokens(keys, key_scales, blocks, offsets, k[written])
    write_tokens(values, value_scales, blocks, offsets, v[written])
    return q.to(qkv.dtype).contiguous()


def rope_kv_write(
    qkv: torch.Tensor | QkvParts,
    place: Placement,
    norms: HeadNorms | None = None,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Normalise, rotate and scale queries and keys; write keys and values into the paged cache.

    In this order: RMSNorm of each query and key head (with ``norms``), rotary embedding in fp32 of the first
    ``rotary_dim`` channels (with a table), logn scaling of the queries (with ``logn_length``); one rounding
    after the last two. RoPE: Su et al., 2021; half-split channel order as in GPT-NeoX. logn: Su, 2021.

    Args:
        qkv: [T, (num_heads + 2 num_kv_heads) head_dim] fp16, bf16 or fp32: each token's queries, keys,
            values; or such a product in parts.
        place: for a cache in 8 bits keys and values are rounded to the dtype of qkv, then quantized
            (cache_scales.py).
        tiles: ``BLOCK_HEADS``, ``num_warps``, ``OVERLAP`` (launch_overlap.py).

    Returns:
        [T, num_heads, head_dim], dtype of qkv: the queries, ready for attention.
    """
    place.heads.expect()
    like = _expect_qkv(qkv, place.heads.width)
    place.expect(like.shape[0], like)
    if norms is not None:
        norms.expect(place.heads.head_dim, like)
    if runs_on_gpu(like):
        return _launch(qkv, place, norms, tiles)
    return rope_kv_write_reference(qkv, place, norms)


def _expect_qkv(qkv: torch.Tensor | QkvParts, width: int) -> torch.Tensor:
    """Raise unless these are rows [T, width]; a tensor with their number of rows, dtype and device."""
    if isinstance(qkv, QkvParts):
        expect("qkv", qkv.parts, (None, None, width), like=qkv.parts, dtype=torch.float32)
        like = qkv.parts.new_empty((qkv.parts.shape[1], 0), dtype=qkv.dtype)
        if qkv.bias is not None:
            expect("bias", qkv.bias, (width,), like=like)
    else:
        expect("qkv", qkv, (None, width), like=qkv)
        like = qkv
    expect_float("qkv", like)
    return like
