"""The warps of Hopper's prompt attention that turn tiles of an 8-bit cache into tiles of 16 bits.

Keys and values are multiplied by their scales here, in fp32, and rounded to the dtype of q, as the PyTorch
reference does: the warps that attend see a 16-bit cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ingot.kernels.attention.hopper_keys import zero_rows
from ingot.kernels.attention.hopper_work import key_tiles, published
from ingot.kernels.cache.int8_cache_values import widened

_PLACED = tl.constexpr(  # four bytes as fp32: 2^15 + 128 + byte
    "{ .reg .b32 t; xor.b32 t, $4, 0x80808080;"
    " prmt.b32 $0, t, 0x47000000, 0x7604; prmt.b32 $1, t, 0x47000000, 0x7614;"
    " prmt.b32 $2, t, 0x47000000, 0x7624; prmt.b32 $3, t, 0x47000000, 0x7634; }"
)
_OFFSET = tl.constexpr(-32896.0)


@triton.jit
def scaled(x: tl.tensor, scale: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Values (int8, fp8e4nv) times scales that broadcast, in DTYPE; of int8 to 1/500 of a step."""
    if x.dtype == tl.float8e4nv:
        wide = widened(x, tl.float16, True, True).to(tl.float32) * scale
    else:  # the offset goes and the scale comes in one fused operation
        placed = tl.inline_asm_elementwise(_PLACED, "=f,=f,=f,=f,r", [x], tl.float32, is_pure=True, pack=4)
        wide = tl.fma(placed, scale, scale * _OFFSET)
    return wide.to(DTYPE)


@gluon.jit
def widen(
    raw_keys: tl.tuple,
    raw_values: tl.tuple,
    keys: tl.tuple,
    values: tl.tuple,
    plan: tl.tuple,
    window: tl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Turn every tile of the first two rings into one of the others."""
    count = 0
    taken = 0
    more = True
    while more:
        _, _, left, first, upper = published(plan, taken)
        taken += 1
        more = left > 0
        if upper > 0:
            lower, end = key_tiles(first, upper, window, SHAPE)
            for tile in range(lower, end):
                known = first + left - tile * SHAPE.BLOCK_N
                widen_tile(raw_keys, keys, count, known, SHAPE)
                widen_tile(raw_values, values, count, known, SHAPE)
                count += 1


@gluon.jit
def widen_tile(
    raw: tl.tuple, ring: tl.tuple, count: tl.tensor, known: tl.tensor, SHAPE: gl.constexpr
) -> None:
    """One tile, 64 tokens at a time; zeros past the ``known`` first tokens."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    tiles_8, raw_full, raw_empty = raw
    values, scales = tiles_8
    tiles, full, empty = ring
    slot = count % SHAPE.STAGES
    phase = (count // SHAPE.STAGES) & 1
    mbarrier.wait(raw_full.index(slot), phase)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    for piece in gl.static_range(SHAPE.BLOCK_N // 64):
        x = values.index(slot).slice(piece * 64, 64).load(LAYOUT)
        scale = scales.index(slot).slice(piece * 64, 64).load(ROWS)
        tiles.index(slot).slice(piece * 64, 64).store(scaled(x, scale[:, None], SHAPE.DTYPE))
    if known < SHAPE.BLOCK_N:
        zero_rows(tiles, slot, known, SHAPE)
    fence_async_shared()
    mbarrier.arrive(raw_empty.index(slot), count=1)
    mbarrier.arrive(full.index(slot), count=1)
