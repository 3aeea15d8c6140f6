"""Keys and values of an int8 cache four to a word of 32 bits: products with a query, and single numbers.

Owns the integer product: a query in 15 bits, as two bytes a number, times keys as they are stored, four
numbers an instruction, with an exact sum. It rounds a query's numbers to 1/16256 of the head's largest, which
fp16 does to that largest itself. Knows no attention; cache_numbers.py makes numbers wide one by one.

    high, low, step = query_words(q)                 # once
    scores = tl.sum(word_products(high, low, words, ASM), axis=2) * step
    wide = word_numbers(words, ASM)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.cache.cache_numbers import FOUR_FLOATS
from ingot.kernels.rows.int8_round import nearest

_MOST = tl.constexpr(127 * 128.0)  # of a query's numbers: the high byte is 127 at most
_LEAST = tl.constexpr(1e-30)
_PRODUCTS = tl.constexpr(  # key words times both bytes
    "{ .reg .s32 t; dp4a.s32.s32 t, $1, $3, 0; shl.b32 t, t, 7; dp4a.s32.s32 $0, $2, $3, t; }"
)


@triton.jit
def query_words(q: tl.tensor) -> tl.tensor:
    """Rows q [C, D] of fp32, D a multiple of 4, as high and low bytes: int32 [C, D / 4] each, and [C] the
    step: a number is (128 high + low) step.
    """
    most = tl.maximum(tl.max(tl.abs(q), axis=1), _LEAST)
    whole = nearest(q * _MOST / most[:, None])
    high = (whole + 64) >> 7
    return _packed(high), _packed(whole - (high << 7)), most / _MOST


@triton.jit
def _packed(numbers: tl.tensor) -> tl.tensor:
    """Bytes [C, D] in int32 → words [C, D / 4]."""
    fours = tl.reshape(numbers & 255, (numbers.shape[0], numbers.shape[1] // 4, 4))
    return tl.sum(fours << (tl.arange(0, 4) * 8)[None, None, :], axis=2)


@triton.jit
def _byte(words: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """One of the four signed bytes, as int32."""
    return (words << (24 - 8 * PLACE)) >> 24


@triton.jit
def word_products(high: tl.tensor, low: tl.tensor, words: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """Sums over the four numbers of words [..., W] times a query's, int32; ``high`` and ``low`` broadcast."""
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
def word_numbers(words: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """Words [A, B, W] as fp32 numbers [A, B, 4 W]."""
    if ASM:
        kinds: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
        a, b, c, d = tl.inline_asm_elementwise(
            FOUR_FLOATS, "=r,=r,=r,=r,r", [words], kinds, is_pure=True, pack=1
        )
    else:
        a, b = _byte(words, 0).to(tl.float32), _byte(words, 1).to(tl.float32)
        c, d = _byte(words, 2).to(tl.float32), _byte(words, 3).to(tl.float32)
    fours = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(fours, (words.shape[0], words.shape[1], words.shape[2] * 4))
