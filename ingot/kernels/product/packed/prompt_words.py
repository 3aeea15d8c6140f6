"""Packed words as the left operand of a warp group's product, in Gluon: loaded, put in order, unpacked.

A thread has two rows, which are eight outputs apart, or a gate and its up. It loads 32 bits at a time from
shared memory, pairs of the columns that a tensor core takes from it, so that nothing changes places and x
keeps its columns in natural order. Then one of a word's values after the other becomes fp16 or bf16, two at a
time.

    words = loaded_words(kept.index(place), LOOP)
    left = operand(wide(words, less, scale, 0, 4, gl.bfloat16, True, True), gl.bfloat16, LEFT)
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import constexpr, tensor

from ingot.kernels.weight.narrow_values import BRAIN_BYTE


def _asm(body: str) -> gl.constexpr:
    return gl.constexpr(f"{{ .reg .b32 v, t, u; {body} }}")


def _nibble(index: int, magic: str, kind: str) -> gl.constexpr:
    """Value ``index`` of 4 bits of two words, placed below a power of two, plus the two values in $2."""
    moved = f"shr.b32 v, $1, {4 * index};" if index else "mov.b32 v, $1;"
    return _asm(f"{moved} lop3.b32 t, v, 0x000F000F, {magic}, 0xEA; add.rn.{kind} $0, t, $2;")


def _brain_byte(index: int) -> gl.constexpr:
    """A byte of each of two words, less 128, in bf16."""
    return _asm(f"shr.b32 v, $1, {8 * index}; {BRAIN_BYTE} add.rn.bf16x2 $0, t, u;")


def _half_byte(selector: str) -> gl.constexpr:
    """A byte of each of two words, beyond 1024, plus the two values in $2, in fp16."""
    return _asm(f"prmt.b32 t, $1, 0x64646464, {selector}; add.rn.f16x2 $0, t, $2;")


_BRAIN_0, _BRAIN_1, _BRAIN_2, _BRAIN_3 = (_nibble(i, "0x43004300", "bf16x2") for i in range(4))
_HALF_0, _HALF_1, _HALF_2, _HALF_3 = (_nibble(i, "0x64006400", "f16x2") for i in range(4))
_BRAIN_LOW, _BRAIN_HIGH = _brain_byte(0), _brain_byte(1)
_HALF_LOW, _HALF_HIGH = _half_byte("0x4240"), _half_byte("0x4341")
_TIMES_BRAIN, _TIMES_HALF = (gl.constexpr(f"mul.rn.{kind} $0, $1, $2;") for kind in ("bf16x2", "f16x2"))
_PLUS_BRAIN = gl.constexpr("add.rn.bf16x2 $0, $1, $2;")


@triton.constexpr_function
def _doublings(first: int, limit: int) -> list[int]:
    return [first << i for i in range(max(limit // first, 1).bit_length() - 1)]


@triton.constexpr_function
def pair_layout(BLOCK_N: int, COLS: int) -> gl.DistributedLinearLayout:
    """Pairs of columns [BLOCK_N, COLS / 2] as four warps hold their product's left operand."""
    registers = [
        [8, 0],
        *([0, pair] for pair in _doublings(4, COLS // 2)),
        *([m, 0] for m in _doublings(64, BLOCK_N)),
    ]
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[BLOCK_N, COLS // 2],
    )


@triton.constexpr_function
def word_layout(GATED: bool, COLS: int) -> gl.DistributedLinearLayout:
    """The words of a group's 64 outputs as they lie in shared memory, [blocks of 16 outputs, pieces, 32]: a
    thread's are those that ``pair_layout`` gives it.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[2, 0, 0] if GATED else [0, 2, 0], [0, 0, 4], [0, 0, 8], *([[0, 8, 0]] * (COLS // 64))],
        lane_bases=[[0, 0, 1], [0, 4, 0], [0, 0, 2], [0, 0, 16], [0, 1, 0]],
        warp_bases=[[0, 2, 0], [1, 0, 0]] if GATED else [[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, COLS // 4, 32],
    )


@gluon.jit
def own_rows(BLOCK_N: constexpr, apart: tensor, LOOP: constexpr, LAYOUT: constexpr) -> tensor:
    """Which output each row of an operand is. Of gates: of every 16 rows eight gates, then their ups, whose
    outputs are ``apart``.
    """
    row = gl.arange(0, BLOCK_N, LAYOUT)
    if LOOP.GATED:
        row = row // 16 * 8 + row % 8 + row // 8 % 2 * apart
    return row


@gluon.jit
def loaded_words(words: tensor, LOOP: constexpr) -> tensor:
    """A group's words of a chunk by pairs of columns [64, COLS / 2] as ``pair_layout`` has them."""
    HALVES: constexpr = LOOP.COLS // 32
    found = gl.reshape(words.load(word_layout(LOOP.GATED, LOOP.COLS)), (2, 2, HALVES, 2, 2, 2, 2, 4, 2, 2))
    # A row of the operand by its bits: blocks of 16 outputs, halves of eight, outputs; then columns.
    if LOOP.GATED:
        found = gl.permute(found, (1, 4, 0, 5, 6, 8, 2, 7, 3, 9))
    else:
        found = gl.permute(found, (0, 1, 4, 5, 6, 8, 2, 7, 3, 9))
    return gl.convert_layout(gl.reshape(found, (64, LOOP.COLS // 2)), pair_layout(64, LOOP.COLS))


@gluon.jit
def twice(x: tensor) -> tensor:
    """16 bits in both halves of 32."""
    return (x.to(gl.int32) & 0xFFFF) * 0x10001


@gluon.jit
def less_of(zeros: tensor, BITS: constexpr, DTYPE: constexpr) -> tensor:
    """What ``wide`` adds to values with these zeros, in both halves of 32 bits."""
    zero = zeros.to(gl.int32)
    if gl.float16 == DTYPE:
        less = zero + 0xE400  # -(1024 + zero)
    elif BITS == 4:
        less = zero + 0xC300  # -(128 + zero)
    else:
        less = (128 - zero).to(gl.float32).to(gl.bfloat16).to(gl.int16, bitcast=True)
    return twice(less)


@gluon.jit
def _both(ASM: constexpr, x: tensor, y: tensor) -> tensor:
    """An operation on the 16-bit halves of x and y."""
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [x, y], gl.int32, is_pure=True, pack=1)


@gluon.jit
def wide(
    words: tensor, less: tensor, scale: tensor, PART: constexpr, LOOP: constexpr, DTYPE: constexpr
) -> tensor:
    """Value PART of every word less its zero, times its group's scale: two of DTYPE in int32."""
    BITS: constexpr = LOOP.BITS
    nothing = gl.full(words.shape, 0, gl.int32, words.type.layout)
    less = less[:, None] + nothing
    if gl.float16 == DTYPE and BITS == 8:
        asm: constexpr = _HALF_LOW if PART == 0 else _HALF_HIGH
        pairs = _both(asm, words, less)
    elif gl.float16 == DTYPE:
        half: constexpr = (
            _HALF_0 if PART == 0 else _HALF_1 if PART == 1 else _HALF_2 if PART == 2 else _HALF_3
        )
        pairs = _both(half, words, less)
    elif BITS == 8:
        byte: constexpr = _BRAIN_LOW if PART == 0 else _BRAIN_HIGH
        pairs = _both(byte, words, less)
        if LOOP.ZEROS:
            pairs = _both(_PLUS_BRAIN, pairs, less)
    else:
        brain: constexpr = (
            _BRAIN_0 if PART == 0 else _BRAIN_1 if PART == 1 else _BRAIN_2 if PART == 2 else _BRAIN_3
        )
        pairs = _both(brain, words, less)
    if LOOP.GROUP > 0:
        times: constexpr = _TIMES_HALF if gl.float16 == DTYPE else _TIMES_BRAIN
        pairs = _both(times, pairs, scale[:, None] + nothing)
    return pairs


@gluon.jit
def operand(pairs: tensor, DTYPE: constexpr, LEFT: constexpr) -> tensor:
    """Two values per int32 [N, K / 2] as the left operand [N, K]."""
    low, high = (pairs & 0xFFFF).to(gl.int16), (pairs >> 16).to(gl.int16)
    values = gl.reshape(gl.join(low, high), (pairs.shape[0], 2 * pairs.shape[1])).to(DTYPE, bitcast=True)
    return gl.convert_layout(values, LEFT)
