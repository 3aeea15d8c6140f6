"""Epilogues of products of few rows, each over a tile of sums [BLOCK_N, BLOCK_T] fp32: bias, residual and
activation; silu(gate) * up; rotary embedding, logn scaling and cache write.

    store_sums(acc, outputs, end, split, out, tokens, N, BLOCK_T)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.activation.plain_activation import bent
from ingot.kernels.product.product_arguments import Heads, Sums


@triton.jit
def split_pairs(acc: tensor, PAIRS: constexpr, BLOCK_T: constexpr) -> tensor:
    """The first and the second PAIRS rows of [2 PAIRS, BLOCK_T]."""
    return tl.split(tl.permute(tl.reshape(acc, [2, PAIRS, BLOCK_T]), [1, 2, 0]))


@triton.jit
def store_sums(
    acc: tensor,
    outputs: tensor,
    end: tensor,
    split: tensor,
    out: Sums,
    tokens: tensor,
    N: constexpr,
    BLOCK_T: constexpr,
    ACTIVATION: constexpr,
) -> None:
    """Part ``split`` of y = acc + bias + residual, rounded once, or its ACTIVATION, before ``end``."""
    token = tl.arange(0, BLOCK_T)
    inside = (outputs < end)[:, None] & (token < tokens)[None, :]
    if out.bias is not None:
        acc += tl.load(out.bias + tl.minimum(outputs, N - 1)).to(tl.float32)[:, None]
    if out.residual is not None:
        places = token[None, :] * out.residual_stride + outputs[:, None]
        acc += tl.load(out.residual + places, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        acc = bent(acc.to(out.y.dtype.element_ty).to(tl.float32), ACTIVATION)
    y_rows = (split * tokens + token).to(tl.int64)
    tl.store(out.y + y_rows[None, :] * N + outputs[:, None], acc.to(out.y.dtype.element_ty), mask=inside)


@triton.jit
def store_activated(
    acc: tensor,
    outputs: tensor,
    end: tensor,
    y_ptr: tensor,
    tokens: tensor,
    INNER: constexpr,
    PAIRS: constexpr,
    BLOCK_T: constexpr,
) -> None:
    """y = cast(silu(gate)) * up of sums whose first half is the gate's, for [PAIRS] outputs before
    ``end``.
    """
    dtype: constexpr = y_ptr.dtype.element_ty
    gate, up = split_pairs(acc.to(dtype).to(tl.float32), PAIRS, BLOCK_T)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    token = tl.arange(0, BLOCK_T)
    inside = (outputs < end)[:, None] & (token < tokens)[None, :]
    tl.store(y_ptr + token[None, :] * INNER + outputs[:, None], (activated * up).to(dtype), mask=inside)


@triton.jit
def turns(heads: tensor, pair: tensor, token: tensor, tokens: tensor, out: Heads, SHAPE: constexpr) -> tensor:
    """Cosines, sines and logn factors (1 but for query heads) of pairs and tokens, [PAIRS, BLOCK_T]."""
    real = token < tokens
    rotary = real[None, :] & (pair < SHAPE.HALF)[:, None]
    places = pair[:, None] + token[None, :] * 0
    if SHAPE.HALF > 0:
        table_rows = tl.load(out.table_rows + token, mask=real, other=0)
        places = (table_rows * out.table_stride)[None, :] + pair[:, None]
        cos = tl.load(out.table + places, mask=rotary, other=1.0)
        sin = tl.load(out.table + places + SHAPE.HALF, mask=rotary, other=0.0)
    else:
        cos = tl.full(places.shape, 1.0, dtype=tl.float32)
        sin = tl.full(places.shape, 0.0, dtype=tl.float32)
    if SHAPE.LOGN:
        position = tl.load(out.positions + token, mask=real, other=0).to(tl.float32)
        factor = tl.maximum(tl.log(position + 1.0) * out.inverse_log, 1.0)[None, :]
        factor = tl.where((heads < SHAPE.HEADS)[:, None], factor, 1.0)
    else:
        factor = tl.full(places.shape, 1.0, dtype=tl.float32)
    return cos, sin, factor


@triton.jit
def channels(pair: tensor, SHAPE: constexpr) -> tensor:
    """The first and the second channel of a head's pairs: the rotary ones, then the others."""
    if 2 * SHAPE.HALF == SHAPE.HEAD_DIM:
        first, second = pair, pair + SHAPE.HALF
    else:
        first = tl.where(pair < SHAPE.HALF, pair, pair + SHAPE.HALF)
        second = tl.where(pair < SHAPE.HALF, pair + SHAPE.HALF, pair + SHAPE.HEAD_DIM // 2)
    return first, second


@triton.jit
def cache_places(slot: tensor, out: Heads, SHAPE: constexpr) -> tensor:
    """Offset of a slot's row of the first head in the cache."""
    block = slot // SHAPE.BLOCK_SIZE
    return block * out.block_stride + (slot - block * SHAPE.BLOCK_SIZE) * out.token_stride


@triton.jit
def store_heads(
    acc: tensor,
    head: tensor,
    pair: tensor,
    end: tensor,
    out: Heads,
    tokens: tensor,
    SHAPE: constexpr,
    PAIRS: constexpr,
    BLOCK_T: constexpr,
) -> None:
    """Store the channels of pairs [PAIRS] before ``end`` of one head, rotated, to q or into the cache."""
    dtype: constexpr = out.q.dtype.element_ty
    a, b = split_pairs(acc.to(dtype).to(tl.float32), PAIRS, BLOCK_T)
    token = tl.arange(0, BLOCK_T)
    real = token < tokens
    first, second = channels(pair, SHAPE)
    if head < SHAPE.HEADS + SHAPE.KV_HEADS:
        cos, sin, factor = turns(pair * 0 + head, pair, token, tokens, out, SHAPE)
        rotated = (a * cos - b * sin) * factor
        b = (b * cos + a * sin) * factor
        a = rotated
    a, b = a.to(dtype), b.to(dtype)
    inside = (pair < end)[:, None] & real[None, :]
    if head < SHAPE.HEADS:
        places = out.q + (token * (SHAPE.HEADS * SHAPE.HEAD_DIM))[None, :] + head * SHAPE.HEAD_DIM
        tl.store(places + first[:, None], a, mask=inside)
        tl.store(places + second[:, None], b, mask=inside)
    else:
        slot = tl.load(out.slots + token, mask=real, other=-1)
        offset = cache_places(slot, out, SHAPE)[None, :]
        inside = inside & (slot >= 0)[None, :]
        if head < SHAPE.HEADS + SHAPE.KV_HEADS:
            places = out.keys + offset + (head - SHAPE.HEADS) * out.head_stride
            tl.store(places + first[:, None], a, mask=inside)
            tl.store(places + second[:, None], b, mask=inside)
        else:
            places = out.value_cache + offset + (head - SHAPE.HEADS - SHAPE.KV_HEADS) * out.head_stride
            tl.store(places + first[:, None], a, mask=inside)
            tl.store(places + second[:, None], b, mask=inside)
