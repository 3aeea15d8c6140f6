"""Numbers of 8 and of 4 bits made wide in registers, in fewer instructions than the compiler finds.

Owns the tricks with bit patterns: an integer placed below the point of a power of two is that power plus the
integer, exactly, and one subtraction leaves the integer. Knows no product and no layout.

    w = widened(w, tl.float16, ASM)
    w = nibbles(words, zero, 2, tl.float16, ASM)
"""

from __future__ import annotations

import triton
import triton.language as tl

_HALF = tl.constexpr(
    "{ .reg .b32 a, b, c, less; mov.b32 less, 0x64806480; xor.b32 a, $2, 0x80808080;"
    " prmt.b32 b, a, 0x64646464, 0x4140; prmt.b32 c, a, 0x64646464, 0x4342;"
    " sub.f16x2 $0, b, less; sub.f16x2 $1, c, less; }"
)
_FLOATS = (
    " xor.b32 a, {source}, 0x80808080;"
    " prmt.b32 p, a, 0x4B000000, 0x7440; prmt.b32 q, a, 0x4B000000, 0x7441;"
    " prmt.b32 r, a, 0x4B000000, 0x7442; prmt.b32 s, a, 0x4B000000, 0x7443;"
)
_REGISTERS = "{ .reg .b32 a, p, q, r, s; .reg .f32 w, x, y, z;"
_LESS = (
    " mov.b32 w, p; mov.b32 x, q; mov.b32 y, r; mov.b32 z, s;"
    " sub.f32 w, w, 0f4B000080; sub.f32 x, x, 0f4B000080;"
    " sub.f32 y, y, 0f4B000080; sub.f32 z, z, 0f4B000080;"
)
_BRAIN = tl.constexpr(
    _REGISTERS
    + _FLOATS.format(source="$2")
    + _LESS
    + " cvt.rn.bf16x2.f32 $0, x, w; cvt.rn.bf16x2.f32 $1, z, y; }"
)
_FULL = tl.constexpr(
    _REGISTERS
    + _FLOATS.format(source="$4")
    + _LESS
    + " mov.b32 $0, w; mov.b32 $1, x; mov.b32 $2, y; mov.b32 $3, z; }"
)


@triton.jit
def widened(numbers: tl.tensor, DTYPE: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """Weights as DTYPE; those of 8 bits exactly, four at a time with ``ASM``."""
    if numbers.dtype != tl.int8:
        wide = numbers.to(DTYPE)
    elif not ASM:
        wide = numbers.to(tl.float32).to(DTYPE)
    elif DTYPE == tl.float16:
        wide = tl.inline_asm_elementwise(_HALF, "=r,=r,r", [numbers], tl.float16, is_pure=True, pack=4)
    elif DTYPE == tl.bfloat16:
        wide = tl.inline_asm_elementwise(_BRAIN, "=r,=r,r", [numbers], tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = tl.inline_asm_elementwise(_FULL, "=r,=r,=r,=r,r", [numbers], tl.float32, is_pure=True, pack=4)
    return wide


def _pair(shift: int, magic: str, add: str) -> tl.constexpr:
    """Two numbers of 4 bits, ``shift`` bits up in two words, plus the two in $2."""
    moved = f" shr.b32 t, $1, {shift};" if shift else " mov.b32 t, $1;"
    return tl.constexpr(
        f"{{ .reg .b32 t, one; mov.b32 one, 0x3F803F80; {moved} lop3.b32 t, t, 0x000F000F, {magic}, 0xEA; {add}; }}"
    )


_ADD_HALF = "add.f16x2 $0, t, $2"
_ADD_BRAIN = "fma.rn.bf16x2 $0, t, one, $2"  # a plain sum needs sm_90
_HALF_0, _HALF_1, _HALF_2, _HALF_3 = (_pair(4 * i, "0x64006400", _ADD_HALF) for i in range(4))
_BRAIN_0, _BRAIN_1, _BRAIN_2, _BRAIN_3 = (_pair(4 * i, "0x43004300", _ADD_BRAIN) for i in range(4))


@triton.jit
def nibbles(
    words: tl.tensor, zero: tl.tensor, INDEX: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
) -> tl.tensor:
    """Bits 4 INDEX to 4 INDEX + 3 of 16-bit words [N, W], less zeros [N] of 0 to 15: exact in DTYPE."""
    if not ASM or DTYPE == tl.float32:
        wide = (((words >> (4 * INDEX)) & 15).to(tl.float32) - zero.to(tl.float32)[:, None]).to(DTYPE)
    elif DTYPE == tl.float16:
        less = tl.broadcast_to((-1024.0 - zero.to(tl.float32)).to(tl.float16)[:, None], words.shape)
        half: tl.constexpr = (
            _HALF_0 if INDEX == 0 else _HALF_1 if INDEX == 1 else _HALF_2 if INDEX == 2 else _HALF_3
        )
        wide = tl.inline_asm_elementwise(half, "=r,r,r", [words, less], tl.float16, is_pure=True, pack=2)
    else:
        less = tl.broadcast_to((-128.0 - zero.to(tl.float32)).to(tl.bfloat16)[:, None], words.shape)
        brain: tl.constexpr = (
            _BRAIN_0 if INDEX == 0 else _BRAIN_1 if INDEX == 1 else _BRAIN_2 if INDEX == 2 else _BRAIN_3
        )
        wide = tl.inline_asm_elementwise(brain, "=r,r,r", [words, less], tl.bfloat16, is_pure=True, pack=2)
    return wide
