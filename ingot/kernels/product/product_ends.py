"""What becomes of the sums of a small product: the ends that its kernels share.

Owns three ends of a tile of sums [BLOCK_N, BLOCK_T] fp32: bias, residual and store; SiLU of the gate's half
times the other; rotary embedding, logn scaling and the cache write. Knows no product and no order of rows:
the outputs' numbers are arguments.

    store_sums(acc, outputs, inside, ...)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_pairs(acc: tl.tensor, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr) -> tl.tensor:
    """The first and the second PAIRS rows of [2 PAIRS, BLOCK_T]."""
    return tl.split(tl.permute(tl.reshape(acc, [2, PAIRS, BLOCK_T]), [1, 2, 0]))


@triton.jit
def store_sums(
    acc: tl.tensor,
    outputs: tl.tensor,
    end: tl.tensor,
    split: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_stride: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """y = acc + bias + residual, rounded once, for outputs below ``end``; into part ``split`` of y."""
    token = tl.arange(0, BLOCK_T)
    inside = (outputs < end)[:, None] & (token < tokens)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + tl.minimum(outputs, N - 1)).to(tl.float32)[:, None]
    if residual_ptr is not None:
        places = token[None, :] * residual_stride + outputs[:, None]
        acc += tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
    y_rows = (split * tokens + token).to(tl.int64)
    tl.store(y_ptr + y_rows[None, :] * N + outputs[:, None], acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_activated(
    acc: tl.tensor,
    outputs: tl.tensor,
    end: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """y = cast(silu(gate)) * up of sums whose first half is the gate's, for outputs [PAIRS] below ``end``."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    gate, up = split_pairs(acc.to(dtype).to(tl.float32), PAIRS, BLOCK_T)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    token = tl.arange(0, BLOCK_T)
    inside = (outputs < end)[:, None] & (token < tokens)[None, :]
    tl.store(y_ptr + token[None, :] * INNER + outputs[:, None], (activated * up).to(dtype), mask=inside)


@triton.jit
def turns(
    heads: tl.tensor,
    pair: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    table_ptr: tl.tensor,
    table_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    table_stride: tl.tensor,
    inverse_log: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LOGN: tl.constexpr,
) -> tl.tensor:
    """Cosines and sines of pairs and tokens, [PAIRS, BLOCK_T], scaled by logn where the head is a query's."""
    real = token < tokens
    rotary = real[None, :] & (pair < HALF)[:, None]
    places = pair[:, None] + token[None, :] * 0
    if HALF > 0:
        places = (tl.load(table_rows_ptr + token, mask=real, other=0) * table_stride)[None, :] + pair[:, None]
        cos = tl.load(table_ptr + places, mask=rotary, other=1.0)
        sin = tl.load(table_ptr + places + HALF, mask=rotary, other=0.0)
    else:
        cos = tl.full(places.shape, 1.0, dtype=tl.float32)
        sin = tl.full(places.shape, 0.0, dtype=tl.float32)
    if LOGN:
        position = tl.load(positions_ptr + token, mask=real, other=0).to(tl.float32)
        factor = tl.maximum(tl.log(position + 1.0) * inverse_log, 1.0)[None, :]
        factor = tl.where((heads < HEADS)[:, None], factor, 1.0)
    else:
        factor = tl.full(places.shape, 1.0, dtype=tl.float32)
    return cos, sin, factor


@triton.jit
def channels(pair: tl.tensor, HEAD_DIM: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """The first and the second channel of a head's pairs: the rotary ones, then the others."""
    if 2 * HALF == HEAD_DIM:
        first, second = pair, pair + HALF
    else:
        first = tl.where(pair < HALF, pair, pair + HALF)
        second = tl.where(pair < HALF, pair + HALF, pair + HEAD_DIM // 2)
    return first, second


@triton.jit
def store_heads(
    acc: tl.tensor,
    head: tl.tensor,
    pair: tl.tensor,
    end: tl.tensor,
    table_ptr: tl.tensor,
    table_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    tokens: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    inverse_log: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOGN: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """The channels of pairs [PAIRS] below ``end`` of one head, turned, to q or into the cache."""
    a, b = split_pairs(acc.to(q_ptr.dtype.element_ty).to(tl.float32), PAIRS, BLOCK_T)
    token = tl.arange(0, BLOCK_T)
    real = token < tokens
    first, second = channels(pair, HEAD_DIM, HALF)
    if head < HEADS + KV_HEADS:
        cos, sin, factor = turns(pair * 0 + head, pair, token, tokens, table_ptr, table_rows_ptr,
                                 positions_ptr, table_stride, inverse_log, HEADS, HALF, LOGN)  # fmt: skip
        turned = (a * cos - b * sin) * factor
        b = (b * cos + a * sin) * factor
        a = turned
    a, b = a.to(q_ptr.dtype.element_ty), b.to(q_ptr.dtype.element_ty)
    inside = (pair < end)[:, None] & real[None, :]
    if head < HEADS:
        places = q_ptr + (token * (HEADS * HEAD_DIM))[None, :] + head * HEAD_DIM
        tl.store(places + first[:, None], a, mask=inside)
        tl.store(places + second[:, None], b, mask=inside)
    else:
        slot = tl.load(slots_ptr + token, mask=real, other=-1)
        block = slot // BLOCK_SIZE
        offset = (block * block_stride + (slot - block * BLOCK_SIZE) * token_stride)[None, :]
        inside = inside & (slot >= 0)[None, :]
        if head < HEADS + KV_HEADS:
            places = key_ptr + offset + (head - HEADS) * head_stride
            tl.store(places + first[:, None], a, mask=inside)
            tl.store(places + second[:, None], b, mask=inside)
        else:
            places = value_ptr + offset + (head - HEADS - KV_HEADS) * head_stride
            tl.store(places + first[:, None], a, mask=inside)
            tl.store(places + second[:, None], b, mask=inside)
