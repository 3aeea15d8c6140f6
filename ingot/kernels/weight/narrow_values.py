"""Weights of 8 and 4 bits in kernels: where their words lie, and how values are widened in few instructions.

An integer placed below the point of a power of two is that power plus the integer, exactly, and one sum
leaves the integer less its zero.

    words = tl.load(word_places(weight_ptr, weight_stride, rows, cols))
    wide = unpack(words, zero, 2, 4, tl.float16, ASM)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor


@triton.jit
def word_places(ptr: tensor, stride: tensor, rows: tensor, cols: tensor) -> tensor:
    """Pointers to words [N, W] (stored_weight.py); four neighbouring columns are adjacent."""
    row = rows.to(tl.int64) // 16 * (16 * stride) + rows % 16 // 2 * 32 + rows % 2 * 4
    column = cols // 32 * 512 + cols % 8 // 4 * 256 + cols % 32 // 8 * 8 + cols % 4
    # The compiler does not see that four are neighbours, and would copy them one by one.
    return ptr + tl.max_contiguous(tl.multiple_of(row[:, None] + column[None, :], (4, 4)), (1, 4))


def _nibbles(shift: int | str, mask: str, magic: str, add: str) -> tl.constexpr:
    """Two values of 4 bits, ``shift`` bits (a number or an operand) up in two words, plus the two in $2."""
    moved = f"shr.b32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return tl.constexpr(
        f"{{ .reg .b32 t, one, part; mov.b32 one, 0x3F803F80; mov.b32 part, 0x2C002C00; {moved}"
        f" lop3.b32 t, t, {mask}, {magic}, 0xEA; {add}; }}"
    )


def _bytes(selector: str) -> tl.constexpr:
    """A byte of each of two words plus the two values in $2, in fp16."""
    return tl.constexpr(f"{{ .reg .b32 t; prmt.b32 t, $1, 0x64646464, {selector}; add.f16x2 $0, t, $2; }}")


# A byte q of each of two words v becomes t + u = q - 128 in bf16, which holds seven bits below the point: t
# is 128 and the lower seven bits, u is -128 or, without the eighth bit, -256.
BRAIN_BYTE = "lop3.b32 t, v, 0x007F007F, 0x43004300, 0xEA; lop3.b32 u, v, 0x00800080, 0xC380C380, 0x6A;"


def _brain_bytes(shift: int) -> tl.constexpr:
    """A byte, ``shift`` bits up in two words, less 128, plus the two values in $2, in bf16, exactly."""
    return tl.constexpr(
        f"{{ .reg .b32 v, t, u, one; mov.b32 one, 0x3F803F80; shr.b32 v, $1, {shift}; {BRAIN_BYTE}"
        " fma.rn.bf16x2 t, t, one, u; fma.rn.bf16x2 $0, t, one, $2; }"
    )


_LOW, _HIGH, _ADD_HALF = "0x000F000F", "0x00F000F0", "add.f16x2 $0, t, $2"
_PART_HALF = "fma.rn.f16x2 $0, t, part, $2"  # a value 4 bits up counts sixteenfold
_ADD_BRAIN = "fma.rn.bf16x2 $0, t, one, $2"  # a plain sum needs sm_90
_HALF_0, _HALF_2 = (_nibbles(shift, _LOW, "0x64006400", _ADD_HALF) for shift in (0, 8))
_HALF_1, _HALF_3 = (_nibbles(shift, _HIGH, "0x64006400", _PART_HALF) for shift in (0, 8))
_BRAIN_0, _BRAIN_1, _BRAIN_2, _BRAIN_3 = (_nibbles(4 * i, _LOW, "0x43004300", _ADD_BRAIN) for i in range(4))
_FROM_HALF_0 = _nibbles("$3", _LOW, "0x64006400", _ADD_HALF)
_FROM_HALF_1 = _nibbles("$3", _HIGH, "0x64006400", _PART_HALF)
_FROM_BRAIN_0 = _nibbles("$3", _LOW, "0x43004300", _ADD_BRAIN)
_HALF_LOW, _HALF_HIGH = _bytes("0x4240"), _bytes("0x4341")
_BRAIN_LOW, _BRAIN_HIGH = _brain_bytes(0), _brain_bytes(8)


@triton.constexpr_function
def above(index: int, bits: int, dtype: tl.dtype) -> float:
    """The power of two that a value is placed below, after it is moved down; of 8 bits in bf16 -128."""
    if dtype == tl.float16:
        return 64.0 if bits == 4 and index % 2 == 1 else 1024.0
    return -128.0 if bits == 8 else 128.0


@triton.jit
def unpack_less(words: tensor, less: tensor, INDEX: constexpr, BITS: constexpr, DTYPE: constexpr) -> tensor:
    """Value INDEX of every 16-bit word plus ``less`` of that shape, -(``above`` + zero), in fp16 or bf16."""
    if tl.float16 == DTYPE:
        if BITS == 8:
            byte: constexpr = _HALF_LOW if INDEX == 0 else _HALF_HIGH
            wide = tl.inline_asm_elementwise(byte, "=r,r,r", [words, less], tl.float16, is_pure=True, pack=2)
        else:
            half: constexpr = (
                _HALF_0 if INDEX == 0 else _HALF_1 if INDEX == 1 else _HALF_2 if INDEX == 2 else _HALF_3
            )
            wide = tl.inline_asm_elementwise(half, "=r,r,r", [words, less], tl.float16, is_pure=True, pack=2)
    elif BITS == 8:
        pair: constexpr = _BRAIN_LOW if INDEX == 0 else _BRAIN_HIGH
        wide = tl.inline_asm_elementwise(pair, "=r,r,r", [words, less], tl.bfloat16, is_pure=True, pack=2)
    else:
        brain: constexpr = (
            _BRAIN_0 if INDEX == 0 else _BRAIN_1 if INDEX == 1 else _BRAIN_2 if INDEX == 2 else _BRAIN_3
        )
        wide = tl.inline_asm_elementwise(brain, "=r,r,r", [words, less], tl.bfloat16, is_pure=True, pack=2)
    return wide


@triton.jit
def unpack(
    words: tensor, zero: tensor, INDEX: constexpr, BITS: constexpr, DTYPE: constexpr, ASM: constexpr
) -> tensor:
    """Value INDEX of every 16-bit word [N, W], less the zeros [N] uint8: exact in DTYPE."""
    if not ASM or tl.float32 == DTYPE:
        value = (words >> (BITS * INDEX)) & ((1 << BITS) - 1)
        wide = (value.to(tl.float32) - zero.to(tl.float32)[:, None]).to(DTYPE)
    else:
        less = (-above(INDEX, BITS, DTYPE) - zero.to(tl.float32)).to(DTYPE)
        wide = unpack_less(words, tl.broadcast_to(less[:, None], words.shape), INDEX, BITS, DTYPE)
    return wide


_SCALED_HALF = tl.constexpr("mul.rn.f16x2 $0, $1, $2;")
_SCALED_BRAIN = tl.constexpr(  # a plain product needs sm_90
    "{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }"
)


@triton.jit
def scaled_beside(wide: tensor, beside: tensor, ASM: constexpr) -> tensor:
    """Values in fp16 or bf16 times scales of the same shape, rounded once."""
    if ASM:
        asm: constexpr = _SCALED_HALF if wide.dtype == tl.float16 else _SCALED_BRAIN
        y = tl.inline_asm_elementwise(asm, "=r,r,r", [wide, beside], wide.dtype, is_pure=True, pack=2)
    else:
        y = (wide.to(tl.float32) * beside.to(tl.float32)).to(wide.dtype)
    return y


@triton.jit
def scaled(wide: tensor, scale: tensor, ASM: constexpr) -> tensor:
    """Values [N, W] in fp16 or bf16 times the scales [N] of their rows, rounded once."""
    return scaled_beside(wide, tl.broadcast_to(scale[:, None], wide.shape), ASM)


@triton.jit
def unpack_from(
    words: tensor, bit: tensor, zero: tensor, INDEX: constexpr, DTYPE: constexpr, ASM: constexpr
) -> tensor:
    """As ``unpack``, of 4 bits: value INDEX, 0 or 1, of every 16-bit word from ``bit`` on, less its zero."""
    # Each value is shifted in its own bit operation: a shared shift would be done in the layout in which
    # words are copied, and they would go through shared memory again.
    if not ASM:
        wide = unpack(words >> bit.to(tl.int16), zero, INDEX, 4, DTYPE, False)
    elif tl.float16 == DTYPE:
        magic: constexpr = 64.0 if INDEX == 1 else 1024.0
        less = tl.broadcast_to((-magic - zero.to(tl.float32)).to(tl.float16)[:, None], words.shape)
        half: constexpr = _FROM_HALF_0 if INDEX == 0 else _FROM_HALF_1
        bits = tl.broadcast_to(bit, words.shape)
        wide = tl.inline_asm_elementwise(
            half, "=r,r,r,r,r", [words, less, bits], tl.float16, is_pure=True, pack=2
        )
    else:
        less = tl.broadcast_to((-128.0 - zero.to(tl.float32)).to(tl.bfloat16)[:, None], words.shape)
        bits = tl.broadcast_to(bit + 4 * INDEX, words.shape)
        wide = tl.inline_asm_elementwise(
            _FROM_BRAIN_0, "=r,r,r,r,r", [words, less, bits], tl.bfloat16, is_pure=True, pack=2
        )
    return wide


@triton.jit
def ended(sums: tensor, ASM: constexpr) -> tensor:
    """The same sums in the same registers, once the product that makes them has ended."""
    if ASM:
        sums = tl.inline_asm_elementwise("", "=r,0", [sums], tl.float32, is_pure=True, pack=1)
    return sums
