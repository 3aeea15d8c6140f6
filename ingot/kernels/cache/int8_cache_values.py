"""Values of a KV cache in 8 bits inside kernels: widened, multiplied. int8_round.py rounds them.

    k = widened(k, tl.float16, ASM)

    high, low, scale = query_words(q)                # once; then four int8 keys per 32-bit word:
    scores = tl.sum(word_products(high, low, words, ASM), axis=2) * scale
    wide = word_values(words, ASM)

A signed byte with its top bit flipped is the byte plus 128. Placed below the point of a power of two it adds
exactly that, and one subtraction leaves the byte. The compiler's own conversion takes one instruction per
value on a unit with a quarter of the lanes. Two values of e4m3 become two of fp16 in one instruction there. A
query of 15 bits, as two bytes per value, is multiplied by four keys in one instruction with an exact sum; it
is rounded to 1/16256 of the head's largest, as fp16 rounds that largest itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.cache.cache_tile import tile_rows
from ingot.kernels.rows.int8_round import nearest

LEAST_SCALE = tl.constexpr(1e-30)  # below any scale
_QUERY_MOST = tl.constexpr(127 * 128.0)  # the high byte is 127 at most


def _turned(source: str) -> str:
    return f".reg .b32 t; xor.b32 t, {source}, 0x80808080;"


def _in_float32(source: str) -> str:
    """Four bytes as fp32 in e, f, g, h: 2^23 + 128 + byte, less 2^23 + 128."""
    parts = [
        f" prmt.b32 {raw}, t, 0x4B000000, 0x744{place}; mov.b32 {wide}, {raw};"
        f" sub.f32 {wide}, {wide}, 0f4B000080;"
        for place, (raw, wide) in enumerate(zip("abcd", "efgh", strict=True))
    ]
    return _turned(source) + " .reg .b32 a, b, c, d; .reg .f32 e, f, g, h;" + "".join(parts)


_HALVES = tl.constexpr(  # four bytes of a register as fp16, two per register: 1024 + 128 + byte, less 1152
    "{ " + _turned("$2") + " .reg .b32 a, b, z; mov.b32 z, 0x64806480;"
    " prmt.b32 a, t, 0x64646464, 0x4140; prmt.b32 b, t, 0x64646464, 0x4342;"
    " sub.f16x2 $0, a, z; sub.f16x2 $1, b, z; }"
)
_BRAINS = tl.constexpr(  # as bf16, by way of fp32: bf16 has only seven bits below the point
    "{ " + _in_float32("$2") + " cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, h, g; }"
)
_FLOATS = tl.constexpr(
    "{ " + _in_float32("$4") + " mov.b32 $0, e; mov.b32 $1, f; mov.b32 $2, g; mov.b32 $3, h; }"
)
_E4M3 = tl.constexpr(  # four bytes as fp16
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
_PRODUCTS = tl.constexpr(  # words of keys times both bytes of a query
    "{ .reg .s32 t; dp4a.s32.s32 t, $1, $3, 0; shl.b32 t, t, 7; dp4a.s32.s32 $0, $2, $3, t; }"
)


@triton.jit
def widened(x: tl.tensor, DTYPE: tl.constexpr, ASM: tl.constexpr, ORDER: tl.constexpr = False) -> tl.tensor:
    """Values (int8, fp8e4nv) of any shape in DTYPE (fp16, bf16, fp32), exactly. Without ASM the compiler
    converts, and e4m3 also without ORDER.

    A compiler that sees an 8-bit operand of a product reorders the columns of some tensor-core instructions
    to save shuffles; ORDER hides the 8 bits, so that sums are those of a wide operand.
    """
    if x.dtype == tl.float8e4nv:
        if ASM and ORDER:
            x = tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [x], tl.float16, is_pure=False, pack=4)
        wide = x.to(DTYPE)
    elif not ASM:
        wide = x.to(tl.float32).to(DTYPE)
    elif tl.float16 == DTYPE:
        wide = tl.inline_asm_elementwise(_HALVES, "=r,=r,r", [x], tl.float16, is_pure=not ORDER, pack=4)
    elif tl.bfloat16 == DTYPE:
        wide = tl.inline_asm_elementwise(_BRAINS, "=r,=r,r", [x], tl.bfloat16, is_pure=not ORDER, pack=4)
    else:
        wide = tl.inline_asm_elementwise(_FLOATS, "=r,=r,=r,=r,r", [x], tl.float32, is_pure=not ORDER, pack=4)
    return wide


@triton.jit
def tile_scales(
    scale_ptr: tl.tensor,
    place: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Scales [BLOCK_N] of tokens start, start + 1, …; 0 from ``end`` on.

    ``place`` is the element offset of a tile inside one block; strides are the cache's, which has HEAD_DIM
    elements per scale.
    """
    order = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        places = place // HEAD_DIM + order
    else:
        rows = tile_rows(table_ptr, start, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
        places = rows // HEAD_DIM
    return tl.load(scale_ptr + places, mask=start + order < end, other=0.0)


@triton.jit
def query_words(q: tl.tensor) -> tl.tensor:
    """Rows q [C, D] fp32, D a multiple of 4, as high and low bytes, int32 [C, D / 4] each, and scales [C]: a
    value is (128 high + low) scale.
    """
    most = tl.maximum(tl.max(tl.abs(q), axis=1), LEAST_SCALE)
    whole = nearest(q * _QUERY_MOST / most[:, None])
    high = (whole + 64) >> 7
    return _packed(high), _packed(whole - (high << 7)), most / _QUERY_MOST


@triton.jit
def _packed(values: tl.tensor) -> tl.tensor:
    """Bytes [C, D] in int32 → words [C, D / 4]."""
    fours = tl.reshape(values & 255, (values.shape[0], values.shape[1] // 4, 4))
    return tl.sum(fours << (tl.arange(0, 4) * 8)[None, None, :], axis=2)


@triton.jit
def _byte(words: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """One of the four signed bytes, as int32."""
    return (words << (24 - 8 * PLACE)) >> 24


@triton.jit
def word_products(high: tl.tensor, low: tl.tensor, words: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """Sums over the four values of words [..., W] times a query's, int32; ``high`` and ``low`` broadcast."""
    if ASM:
        total = tl.inline_asm_elementwise(
            _PRODUCTS, "=r,r,r,r", [high, low, words], tl.int32, is_pure=True, pack=1
        )
    else:
        total = words * 0
        for place in tl.static_range(4):
            total += _byte(words, place) * (_byte(high, place) * 128 + _byte(low, place))
    return total


@triton.jit
def word_values(words: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """Words [A, B, W] as fp32 values [A, B, 4 W]."""
    if ASM:
        kinds: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
        a, b, c, d = tl.inline_asm_elementwise(_FLOATS, "=r,=r,=r,=r,r", [words], kinds, is_pure=True, pack=1)
    else:
        a, b = _byte(words, 0).to(tl.float32), _byte(words, 1).to(tl.float32)
        c, d = _byte(words, 2).to(tl.float32), _byte(words, 3).to(tl.float32)
    fours = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(fours, (words.shape[0], words.shape[1], words.shape[2] * 4))


def knows_asm(cache: torch.Tensor) -> bool:
    """Whether kernels may use inline assembly, which the interpreter (CPU tensors) does not have."""
    return cache.device.type != "cpu"
