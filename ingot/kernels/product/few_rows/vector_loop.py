"""The products of one row with a whole weight, read once at the speed of memory.

RMSNorm folds into the row, the first weights are loaded while the previous kernel runs, and what an epilogue
adds is loaded before the product.

    vector_sums(x, weight, out, N, LOOP)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.activation.plain_activation import bent
from ingot.kernels.launch_overlap import start_next, wait_for_previous
from ingot.kernels.product.few_rows.product_epilogues import cache_places, split_pairs, store_activated, turns
from ingot.kernels.product.product_arguments import Heads, InputRows, Sums, Weight


@triton.jit
def _normed(x: tensor, rstd: tensor, weight: tensor, DTYPE: constexpr) -> tensor:
    """``cast(cast(x * rstd) * weight)``, as in rms_norm.py."""
    y = (x.to(tl.float32) * rstd).to(DTYPE).to(tl.float32)
    return (y * weight.to(tl.float32)).to(DTYPE)


@triton.jit
def _weights(weight: Weight, rows: tensor, cols: tensor, width: tensor, MASKED: constexpr) -> tensor:
    """A tile [rows, cols] of the weight, streamed past the caches; zeros from column ``width`` on."""
    places = weight.ptr + (rows.to(tl.int64) * weight.stride)[:, None] + cols[None, :]
    if MASKED:
        return tl.load(places, mask=(cols < width)[None, :], other=0.0, eviction_policy="evict_first")
    return tl.load(places, eviction_policy="evict_first")


@triton.jit
def _prepared(x: InputRows, weight: Weight, rows: tensor, LOOP: constexpr) -> tensor:
    """What a program holds from tile to tile: (first weights, x, 1 / rms); waits for the previous kernel
    after it has issued the loads of weights. A row that fits BLOCK_K stays in registers, normalised; what a
    variant does not hold is a scalar 0.
    """
    K: constexpr = LOOP.K
    BLOCK_X: constexpr = LOOP.BLOCK_X
    dtype: constexpr = x.ptr.dtype.element_ty
    cols = tl.arange(0, LOOP.BLOCK_K)
    row = 0.0
    rstd = 0.0
    w = _weights(weight, rows, cols, K, K % LOOP.BLOCK_K != 0)
    if K <= LOOP.BLOCK_K and x.norm is not None:
        g = tl.load(x.norm + cols, mask=cols < K, other=0.0)
    wait_for_previous(LOOP.OVERLAP)
    if K <= LOOP.BLOCK_K:
        row = tl.load(x.ptr + cols, mask=cols < K, other=0.0)
        if x.norm is not None:
            wide = row.to(tl.float32)
            row = _normed(row, tl.rsqrt(tl.sum(wide * wide, axis=0) / K + x.eps), g, dtype)
        row = row.to(tl.float32)
    elif x.norm is not None:
        squares = tl.zeros([BLOCK_X], dtype=tl.float32)
        for start in tl.static_range(0, K, BLOCK_X):
            piece = start + tl.arange(0, BLOCK_X)
            part = tl.load(x.ptr + piece, mask=piece < K, other=0.0).to(tl.float32)
            squares += part * part
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + x.eps)
    return w, row, rstd


@triton.jit
def _product(
    w: tensor,
    row: tensor,
    rstd: tensor,
    x: InputRows,
    weight: Weight,
    rows: tensor,
    next_rows: tensor,
    has_next: tensor,
    LOOP: constexpr,
) -> tensor:
    """Rows ``rows`` of the weight times norm(x), [BLOCK_N, 1] fp32, and the next tile's w, loaded ahead."""
    K: constexpr = LOOP.K
    BLOCK_N: constexpr = LOOP.BLOCK_N
    BLOCK_K: constexpr = LOOP.BLOCK_K
    dtype: constexpr = x.ptr.dtype.element_ty
    masked: constexpr = K % BLOCK_K != 0
    cols = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8], dtype=tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        here = start + cols
        if start + BLOCK_K < K:
            ahead = _weights(weight, rows, here + BLOCK_K, K, masked)
        else:
            ahead = _weights(weight, next_rows, cols, tl.where(has_next, K, 0), True)
        if K > BLOCK_K:
            row = tl.load(x.ptr + here, mask=here < K, other=0.0)
            if x.norm is not None:
                row = _normed(row, rstd, tl.load(x.norm + here, mask=here < K, other=0.0), dtype)
            row = row.to(tl.float32)
        products = tl.reshape(w.to(tl.float32) * row[None, :], [BLOCK_N, BLOCK_K // 8, 8])
        sums += tl.sum(products, axis=2)
        w = ahead
    return tl.sum(sums, axis=1)[:, None], w


@triton.jit
def _start_next(is_last: tensor, LOOP: constexpr) -> None:
    """With OVERLAP 4 the next kernel may start with the last tile."""
    if LOOP.OVERLAP == 4:  # noqa: SIM102 - one condition is known when compiling, the other is not
        if is_last:
            start_next(LOOP.OVERLAP)


@triton.jit
def _outputs(tile: tensor, N: constexpr, BLOCK_N: constexpr) -> tensor:
    """The weight rows of a tile; the last row again past the end."""
    return tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)


@triton.jit
def vector_sums(
    x: InputRows, weight: Weight, out: Sums, N: constexpr, LOOP: constexpr, ACTIVATION: constexpr
) -> None:
    """Tiles of BLOCK_N outputs, as far apart as there are programs."""
    BLOCK_N: constexpr = LOOP.BLOCK_N
    TILES: constexpr = (N + BLOCK_N - 1) // BLOCK_N
    token = tl.arange(0, 1)
    first, programs = tl.program_id(0), tl.num_programs(0)
    w, row, rstd = _prepared(x, weight, _outputs(first, N, BLOCK_N), LOOP)
    for tile in tl.range(first, TILES, programs, num_stages=1):
        rows, next_rows = _outputs(tile, N, BLOCK_N), _outputs(tile + programs, N, BLOCK_N)
        outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (outputs < N)[:, None] & (token < x.tokens)[None, :]
        # Loaded before the product, so that nothing waits for them after it.
        addend = tl.zeros([BLOCK_N, 1], dtype=tl.float32)
        if out.bias is not None:
            addend += tl.load(out.bias + rows).to(tl.float32)[:, None]
        if out.residual is not None:
            places = token[None, :] * out.residual_stride + outputs[:, None]
            addend += tl.load(out.residual + places, mask=inside, other=0.0).to(tl.float32)
        has_next = tile + programs < TILES
        _start_next(tile + programs >= TILES, LOOP)
        acc, w = _product(w, row, rstd, x, weight, rows, next_rows, has_next, LOOP)
        y = (acc + addend).to(out.y.dtype.element_ty)
        if ACTIVATION is not None:
            y = bent(y.to(tl.float32), ACTIVATION).to(out.y.dtype.element_ty)
        tl.store(out.y + token[None, :].to(tl.int64) * N + outputs[:, None], y, mask=inside)


@triton.jit
def gate_up_rows(start: tensor, INNER: constexpr, BLOCK_N: constexpr) -> tensor:
    """Gate rows of outputs from ``start`` on, then their up rows; the last again past the end."""
    PAIRS: constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    return tl.minimum(start + lane % PAIRS, INNER - 1) + (lane // PAIRS) * INNER


@triton.jit
def vector_gate_up(x: InputRows, weight: Weight, y_ptr: tensor, INNER: constexpr, LOOP: constexpr) -> None:
    """Tiles of BLOCK_N / 2 outputs, as far apart as there are programs."""
    BLOCK_N: constexpr = LOOP.BLOCK_N
    PAIRS: constexpr = BLOCK_N // 2
    TILES: constexpr = (INNER + PAIRS - 1) // PAIRS
    first, programs = tl.program_id(0), tl.num_programs(0)
    w, row, rstd = _prepared(x, weight, gate_up_rows(first * PAIRS, INNER, BLOCK_N), LOOP)
    for tile in tl.range(first, TILES, programs, num_stages=1):
        rows = gate_up_rows(tile * PAIRS, INNER, BLOCK_N)
        next_rows = gate_up_rows((tile + programs) * PAIRS, INNER, BLOCK_N)
        has_next = tile + programs < TILES
        _start_next(tile + programs >= TILES, LOOP)
        acc, w = _product(w, row, rstd, x, weight, rows, next_rows, has_next, LOOP)
        outputs = tile * PAIRS + tl.arange(0, PAIRS)
        store_activated(acc, outputs, INNER, y_ptr, x.tokens, INNER, PAIRS, 1)


@triton.jit
def _pair_rows(tile: tensor, LAST: constexpr, SHAPE: constexpr, BLOCK_N: constexpr) -> tensor:
    """The weight rows of a tile's pairs: first channels, then second ones."""
    PAIRS: constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    index = tl.minimum(tile * PAIRS + lane % PAIRS, LAST)
    pair = index % (SHAPE.HEAD_DIM // 2)
    first = tl.where(pair < SHAPE.HALF, pair, pair + SHAPE.HALF)
    second = tl.where(pair < SHAPE.HALF, pair + SHAPE.HALF, pair + SHAPE.HEAD_DIM // 2)
    return index // (SHAPE.HEAD_DIM // 2) * SHAPE.HEAD_DIM + tl.where(lane < PAIRS, first, second)


@triton.jit
def _store_by_role(
    values: tensor,
    heads: tensor,
    channel: tensor,
    inside: tensor,
    token: tensor,
    cache_rows: tensor,
    has_slot: tensor,
    out: Heads,
    SHAPE: constexpr,
) -> None:
    """Store channels [P] of heads [P] for every token [T] in query output, key cache or value cache."""
    HEADS: constexpr = SHAPE.HEADS
    BEFORE: constexpr = SHAPE.HEADS + SHAPE.KV_HEADS  # the first value head
    HEAD_DIM: constexpr = SHAPE.HEAD_DIM
    values = values.to(out.q.dtype.element_ty)
    is_q = inside & (heads < HEADS)[:, None]
    is_k = inside & ((heads >= HEADS) & (heads < BEFORE))[:, None] & has_slot[None, :]
    is_v = inside & (heads >= BEFORE)[:, None] & has_slot[None, :]
    q_places = token[None, :] * (HEADS * HEAD_DIM) + (heads * HEAD_DIM + channel)[:, None]
    tl.store(out.q + q_places, values, mask=is_q)
    keys = cache_rows[None, :] + ((heads - HEADS) * out.head_stride + channel)[:, None]
    tl.store(out.keys + keys, values, mask=is_k)
    places = cache_rows[None, :] + ((heads - HEADS - SHAPE.KV_HEADS) * out.head_stride + channel)[:, None]
    tl.store(out.value_cache + places, values, mask=is_v)


@triton.jit
def vector_heads(x: InputRows, weight: Weight, out: Heads, SHAPE: constexpr, LOOP: constexpr) -> None:
    """Tiles of BLOCK_N / 2 channel pairs; one angle rotates a pair, 0 those past the rotary channels."""
    BLOCK_N: constexpr = LOOP.BLOCK_N
    PAIRS: constexpr = BLOCK_N // 2
    HALF: constexpr = SHAPE.HALF
    IN_HEAD: constexpr = SHAPE.HEAD_DIM // 2
    LAST: constexpr = (SHAPE.HEADS + 2 * SHAPE.KV_HEADS) * IN_HEAD - 1
    TILES: constexpr = LAST // PAIRS + 1
    token = tl.arange(0, 1)
    first, programs = tl.program_id(0), tl.num_programs(0)
    w, row, rstd = _prepared(x, weight, _pair_rows(first, LAST, SHAPE, BLOCK_N), LOOP)
    for tile in tl.range(first, TILES, programs, num_stages=1):
        rows = _pair_rows(tile, LAST, SHAPE, BLOCK_N)
        next_rows = _pair_rows(tile + programs, LAST, SHAPE, BLOCK_N)
        index = tile * PAIRS + tl.arange(0, PAIRS)
        heads, pair = index // IN_HEAD, index % IN_HEAD
        inside = (index <= LAST)[:, None] & (token < x.tokens)[None, :]
        # Loaded before the product, so that nothing waits for them after it.
        bias = tl.zeros([BLOCK_N, 1], dtype=tl.float32)
        if out.bias is not None:
            bias += tl.load(out.bias + rows).to(tl.float32)[:, None]
        cos, sin, factor = turns(heads, pair, token, x.tokens, out, SHAPE)
        slot = tl.load(out.slots + token, mask=token < x.tokens, other=-1)
        cache_rows = cache_places(slot, out, SHAPE)
        has_next = tile + programs < TILES
        _start_next(tile + programs >= TILES, LOOP)
        acc, w = _product(w, row, rstd, x, weight, rows, next_rows, has_next, LOOP)
        a, b = split_pairs((acc + bias).to(out.q.dtype.element_ty).to(tl.float32), PAIRS, 1)
        is_v = (heads >= SHAPE.HEADS + SHAPE.KV_HEADS)[:, None]
        rotated = tl.where(is_v, a, (a * cos - b * sin) * factor)
        b = tl.where(is_v, b, (b * cos + a * sin) * factor)
        first_channel = tl.where(pair < HALF, pair, pair + HALF)
        second_channel = tl.where(pair < HALF, pair + HALF, pair + IN_HEAD)
        _store_by_role(rotated, heads, first_channel, inside, token, cache_rows, slot >= 0, out, SHAPE)
        _store_by_role(b, heads, second_channel, inside, token, cache_rows, slot >= 0, out, SHAPE)
