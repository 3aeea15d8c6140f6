"""Rounding to 8 bits inside kernels, to the bit by the rule of int8_rows.py; DTYPE is int8 or fp8e4nv.

scale, inverse = scale_of(tl.max(tl.abs(wide), axis=0), DTYPE)
tl.store(y_ptr + cols, numbers_of(wide, inverse, DTYPE), mask=inside)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.rows.int8_rows import E4M3_MOST, LEAST, LEAST_MAGNITUDE, MOST

_LOWEST, _MOST = tl.constexpr(float(LEAST)), tl.constexpr(float(MOST))
_E4M3_MOST = tl.constexpr(E4M3_MOST)
_LEAST = tl.constexpr(LEAST_MAGNITUDE)
# Added to a value below 2^22 it leaves the nearest integer, ties to even, in the lowest bits.
WHOLE = tl.constexpr(12582912.0)
_WHOLE_BITS = tl.constexpr(0x4B400000)
_EXPONENT = tl.constexpr(0x7F800000)
_LEAST_POWER = tl.constexpr((127 - 6) << 23)  # 2^-6: below it e4m3 has steps of one size
# 1.5 · 2^20 times the power of two of a value: added, it leaves three bits below the value's point.
_UP = tl.constexpr(20 << 23)
_HALF = tl.constexpr(1 << 22)


@triton.jit
def scale_of(most: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The scale for a largest magnitude, and its inverse."""
    HIGHEST: tl.constexpr = _E4M3_MOST if tl.float8e4nv == DTYPE else _MOST
    most = tl.maximum(most, _LEAST)
    return tl.div_rn(most, HIGHEST), tl.div_rn(1.0, most) * HIGHEST


@triton.jit
def numbers_of(wide: tl.tensor, inverse: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 as values of DTYPE; clamped before rounding, so that no multiply and add are fused."""
    if tl.float8e4nv == DTYPE:
        cut = tl.minimum(tl.maximum(wide * inverse, -_E4M3_MOST), _E4M3_MOST)
        power = tl.maximum(cut.to(tl.int32, bitcast=True) & _EXPONENT, _LEAST_POWER)
        shift = ((power + _UP) | _HALF).to(tl.float32, bitcast=True)
        # Rounded here, so that the cast is exact: the interpreter rounds differently.
        values = ((cut + shift) - shift).to(tl.float8e4nv)
    else:
        cut = tl.minimum(tl.maximum(wide * inverse, _LOWEST), _MOST)
        values = (cut + WHOLE).to(tl.int32, bitcast=True).to(tl.int8)
    return values


@triton.jit
def as_wide(places: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The same places of values in 8 bits, stored by a thread in runs as long as those of DTYPE.

    Longer runs, which bytes allow, would give threads other channels than in the kernel that stores DTYPE,
    and sums over a row another order, so other bits. The compiler makes a run as long as it can prove places
    aligned; of what is added here it only knows that RUN divides it.
    """
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth  # 16 bytes
    return places + tl.minimum(tl.program_id(0), 0) * RUN


@triton.jit
def store_int8_row(
    wide: tl.tensor,
    y_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    STATIC: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Quantize and store a row [BLOCK] of DTYPE, zeros where not ``inside``, and its scale, unless STATIC."""
    cols = tl.arange(0, wide.shape[0])
    kind: tl.constexpr = y_ptr.dtype.element_ty
    inverse = row_inverse(tl.max(tl.abs(wide), axis=0), scale_ptr, row, STATIC, kind)
    tl.store(as_wide(y_ptr + cols, DTYPE), numbers_of(wide, inverse, kind), mask=inside)


@triton.jit
def store_int8_groups(
    wide: tl.tensor,
    y_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Quantize and store a row [BLOCK] of DTYPE, COUNT values in whole groups and then zeros, and the scales
    of its groups.
    """
    GROUPS: tl.constexpr = wide.shape[0] // GROUP
    groups, cols = tl.arange(0, GROUPS), tl.arange(0, wide.shape[0])
    kind: tl.constexpr = y_ptr.dtype.element_ty
    most = tl.max(tl.reshape(tl.abs(wide), [GROUPS, GROUP]), axis=1)
    scale, inverse = scale_of(most, kind)
    tl.store(scale_ptr + groups, scale, mask=groups < COUNT // GROUP)
    # One dimension again: a row's values stay where they are.
    spread = tl.reshape(tl.broadcast_to(inverse[:, None], [GROUPS, GROUP]), [GROUPS * GROUP])
    tl.store(as_wide(y_ptr + cols, DTYPE), numbers_of(wide, spread, kind), mask=cols < COUNT)


@triton.jit
def row_inverse(
    most: tl.tensor, scale_ptr: tl.tensor, row: tl.tensor, STATIC: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """The inverse scale of a row with a largest magnitude; its scale is stored or, if STATIC, read."""
    if STATIC:
        return tl.div_rn(1.0, tl.load(scale_ptr))
    scale, inverse = scale_of(most, DTYPE)
    tl.store(scale_ptr + row, scale)
    return inverse


@triton.jit
def nearest(wide: tl.tensor) -> tl.tensor:
    """The nearest integers to fp32 values of less than 2^22, ties to even, as int32."""
    return (wide + WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS


@triton.jit
def zeroed_numbers(wide: tl.tensor, step: tl.tensor, zero: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """fp32 values quantized to int32 by the rule of block_rows.py; steps and zeros broadcast."""
    LOW: tl.constexpr = -(1 << (BITS - 1))
    HIGH: tl.constexpr = (1 << (BITS - 1)) - 1
    inverse = tl.div_rn(1.0, step)
    cut = tl.minimum(
        tl.maximum(wide * inverse, LOW - zero), HIGH - zero
    )  # whole limits: clamped, then rounded
    return nearest(cut) + zero.to(tl.int32)


@triton.jit
def steps_at(
    cols: tl.tensor,
    step_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Steps and zeros of columns ``cols`` < WIDTH, one per GROUP columns; constants."""
    known = cols < WIDTH
    step = tl.load(step_ptr + cols // GROUP, mask=known, other=1.0)
    zero = tl.load(zero_ptr + cols // GROUP, mask=known, other=0.0)
    return step, zero


@triton.jit
def block_numbers(
    wide: tl.tensor,
    cols: tl.tensor,
    step: tl.tensor,
    zero: tl.tensor,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """fp32 values of columns ``cols`` quantized by the rule of block_rows.py, int8, 0 from COUNT on."""
    return tl.where(cols < COUNT, zeroed_numbers(wide, step, zero, BITS), 0).to(tl.int8)


def row_scales(rows: int, static: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """New scales for a kernel to write, one per row; or the static one, which it reads."""
    return torch.empty(rows, dtype=torch.float32, device=device) if static is None else static
