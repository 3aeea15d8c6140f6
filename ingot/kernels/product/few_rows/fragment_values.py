"""Values of 8 and 4 bits as the tensor cores' operands, one bit operation away from their words.

A value placed below the point of a power of two is that power plus the value, exactly, without arithmetic.
The excess is subtracted from the sums of a product instead.

    wide = raised(words, 2, 4, tl.float16, ASM)        # excess(4, tl.float16) + value · lift(…)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.weight.narrow_values import BRAIN_BYTE


def _nibbles(shift: int, mask: str, magic: str) -> tl.constexpr:
    """Two values of 4 bits, ``shift`` bits up in two words."""
    moved = f"shr.b32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return tl.constexpr(f"{{ .reg .b32 t; {moved} lop3.b32 $0, t, {mask}, {magic}, 0xEA; }}")


_LOW, _HIGH, _HALF, _BRAIN = "0x000F000F", "0x00F000F0", "0x64006400", "0x43004300"
_HALF_0, _HALF_2 = _nibbles(0, _LOW, _HALF), _nibbles(8, _LOW, _HALF)
_HALF_1, _HALF_3 = _nibbles(0, _HIGH, _HALF), _nibbles(8, _HIGH, _HALF)
_BRAIN_0, _BRAIN_1, _BRAIN_2, _BRAIN_3 = (_nibbles(4 * i, _LOW, _BRAIN) for i in range(4))
_BYTE_0, _BYTE_1 = (
    tl.constexpr(f"{{ .reg .b32 t, m; mov.b32 m, 0x64806480; prmt.b32 t, $1, 0x64646464, {s}; "
                 "sub.rn.f16x2 $0, t, m; }")
    for s in ("0x4240", "0x4341")
)  # fmt: skip
_BRAIN_BYTE_0, _BRAIN_BYTE_1 = (
    tl.constexpr(f"{{ .reg .b32 v, t, u, one; mov.b32 one, 0x3F803F80; shr.b32 v, $1, {shift};"
                 f" {BRAIN_BYTE} fma.rn.bf16x2 $0, t, one, u; }}")
    for shift in (0, 8)
)  # fmt: skip


@triton.constexpr_function
def lift(index: int, bits: int, dtype: tl.dtype) -> float:
    """The factor of a raised value: in fp16 two of a word's four values are not moved down."""
    return 16.0 if bits == 4 and index % 2 == 1 and dtype == tl.float16 else 1.0


@triton.constexpr_function
def excess(bits: int, dtype: tl.dtype) -> float:
    """What is added to a raised value. Nothing for 8 bits, where one more operation removes it: in sums it
    would be far larger than the values.
    """
    if bits == 8:
        return 0.0
    return 1024.0 if dtype == tl.float16 else 128.0


@triton.constexpr_function
def centre(bits: int, dtype: tl.dtype) -> int:
    """What is subtracted from a value as it is raised."""
    return 128 if bits == 8 else 0


@triton.jit
def raised(words: tensor, INDEX: constexpr, BITS: constexpr, DTYPE: constexpr, ASM: constexpr) -> tensor:
    """Value INDEX of every 16-bit word, less ``centre``, times ``lift``, plus ``excess``, exactly."""
    if not ASM:
        value = ((words.to(tl.int32) >> (BITS * INDEX)) & ((1 << BITS) - 1)).to(tl.float32)
        value -= centre(BITS, DTYPE)
        wide = (value * lift(INDEX, BITS, DTYPE) + excess(BITS, DTYPE)).to(DTYPE)
    elif BITS == 8 and tl.float16 == DTYPE:
        byte: constexpr = _BYTE_0 if INDEX == 0 else _BYTE_1
        wide = tl.inline_asm_elementwise(byte, "=r,r", [words], tl.float16, is_pure=True, pack=2)
    elif BITS == 8:
        pair: constexpr = _BRAIN_BYTE_0 if INDEX == 0 else _BRAIN_BYTE_1
        wide = tl.inline_asm_elementwise(pair, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    elif tl.float16 == DTYPE:
        half: constexpr = (
            _HALF_0 if INDEX == 0 else _HALF_1 if INDEX == 1 else _HALF_2 if INDEX == 2 else _HALF_3
        )
        wide = tl.inline_asm_elementwise(half, "=r,r", [words], tl.float16, is_pure=True, pack=2)
    else:
        brain: constexpr = (
            _BRAIN_0 if INDEX == 0 else _BRAIN_1 if INDEX == 1 else _BRAIN_2 if INDEX == 2 else _BRAIN_3
        )
        wide = tl.inline_asm_elementwise(brain, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    return wide
