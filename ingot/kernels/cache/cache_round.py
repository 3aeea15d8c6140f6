"""Rounding heads to a KV cache's 8 bits inside kernels, by the rule of cache_scales.py: the same numbers.

Owns the choice between whole numbers (int8_round.py's) and e4m3, and the latter's arithmetic. Knows no op.

    scale, inverse = cache_scale_of(most, tl.float8e4nv)
    tl.store(key_ptr + places, cache_numbers_of(wide, inverse[:, None], tl.float8e4nv), mask=inside)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.cache.cache_scales import E4M3_MOST
from ingot.kernels.rows.int8_round import numbers_of, scale_of
from ingot.kernels.rows.int8_rows import LEAST_MAGNITUDE

_MOST = tl.constexpr(E4M3_MOST)
_LEAST = tl.constexpr(LEAST_MAGNITUDE)
_EXPONENT = tl.constexpr(0x7F800000)
_LEAST_POWER = tl.constexpr((127 - 6) << 23)  # 2^-6: below it e4m3 has steps of one size
# 1.5 · 2^20 times the power of two of a number: added, it leaves three bits below the number's point.
_UP = tl.constexpr(20 << 23)
_HALF = tl.constexpr(1 << 22)


@triton.jit
def cache_scale_of(most: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The scale for a head's largest magnitude in a cache of DTYPE (int8, fp8e4nv), and what its values are
    multiplied by.
    """
    if tl.float8e4nv == DTYPE:
        most = tl.maximum(most, _LEAST)
        scale, inverse = tl.div_rn(most, _MOST), tl.div_rn(1.0, most) * _MOST
    else:
        scale, inverse = scale_of(most)
    return scale, inverse


@triton.jit
def cache_numbers_of(wide: tl.tensor, inverse: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 values as numbers of DTYPE (int8, fp8e4nv): nearest, ties to even, none beyond the largest."""
    if tl.float8e4nv == DTYPE:
        cut = tl.minimum(tl.maximum(wide * inverse, -_MOST), _MOST)
        power = tl.maximum(cut.to(tl.int32, bitcast=True) & _EXPONENT, _LEAST_POWER)
        shift = ((power + _UP) | _HALF).to(tl.float32, bitcast=True)
        # Rounded here, the cast is exact: the interpreter's own rounding is another.
        numbers = ((cut + shift) - shift).to(tl.float8e4nv)
    else:
        numbers = numbers_of(wide, inverse)
    return numbers
