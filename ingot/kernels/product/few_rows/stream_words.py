"""Packed words times a row of x on tensor cores, in Gluon, for stream_loop.py.

stored_weight.py has the layout: 16 neighbouring bytes are a thread's left operand of one tensor-core product
per part of the words. They become bf16 without arithmetic on their place, less their zeros.

    total = add_block(stages.index(slot), x, scales, total, INDEX, ZEROS, LOOP)    # LOOP: a StreamLoop
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import constexpr, tensor

from ingot.kernels.weight.narrow_values import BRAIN_BYTE


def _widened(bits: int, part: int) -> str:
    """Four registers a0 to a3 of two bf16 values each from words $4 to $7, less their zeros: of 4 bits
    $12 to $15 are -(128 + zero), twice.
    """
    steps = []
    for index in range(4):
        own, shift = f"a{index}", 16 // (16 // bits) * part
        steps.append(f"shr.b32 v, ${4 + index}, {shift};" if shift else f"mov.b32 v, ${4 + index};")
        if bits == 4:
            steps.append(
                f"lop3.b32 t, v, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 {own}, t, one, ${12 + index};"
            )
        else:
            steps.append(f"{BRAIN_BYTE} fma.rn.bf16x2 {own}, t, one, u;")
    return " ".join(steps)


def _product(bits: int, part: int, half: int) -> gl.constexpr:
    """Part ``part`` of four words times columns of x, of which half ``half`` of the four registers $8 to $11
    belongs to these words, added to the last four operands.
    """
    sums = 12 if bits == 8 else 16
    product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {a0, a2, a1, a3}"
    columns = f"{{${8 + 2 * half}, ${9 + 2 * half}}}, {{${sums}, ${sums + 1}, ${sums + 2}, ${sums + 3}}};"
    one = ".reg .b32 v, t, u, one, a0, a1, a2, a3; mov.b32 one, 0x3F803F80;"
    return gl.constexpr(f"{{ {one} {_widened(bits, part)} {product}, {columns} }}")


_OUT_8 = gl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f")
_OUT_4 = gl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f")
(_4_00, _4_01), (_4_10, _4_11), (_4_20, _4_21), (_4_30, _4_31) = (
    (_product(4, part, 0), _product(4, part, 1)) for part in range(4)
)
(_8_00, _8_01), (_8_10, _8_11) = ((_product(8, part, 0), _product(8, part, 1)) for part in range(2))


@triton.constexpr_function
def stage_layout() -> gl.DistributedLinearLayout:
    """A block's words of a stage [8 chunks of 16 lines, 32] as warps take them: by 16 bytes per thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [4, 0], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 32],
    )


@triton.constexpr_function
def thread_layout() -> gl.BlockedLayout:
    """Four values per thread: [256, 4]."""
    return gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0])


@gluon.jit
def _product_of(
    words: tensor, x: tensor, less: tensor, acc: tensor, PART: constexpr, HALF: constexpr, LOOP: constexpr
) -> tensor:
    """``acc`` plus part PART of four words per thread, of 4 bits plus ``less``, times x; all [256, 4]."""
    first_8: constexpr = _8_00 if PART == 0 else _8_10
    second_8: constexpr = _8_01 if PART == 0 else _8_11
    first_4: constexpr = _4_00 if PART == 0 else _4_10 if PART == 1 else _4_20 if PART == 2 else _4_30
    second_4: constexpr = _4_01 if PART == 0 else _4_11 if PART == 1 else _4_21 if PART == 2 else _4_31
    first: constexpr = first_8 if LOOP.BITS == 8 else first_4
    second: constexpr = second_8 if LOOP.BITS == 8 else second_4
    asm: constexpr = first if HALF == 0 else second
    if LOOP.BITS == 8:
        of_8 = [words, x, acc]
        total = gl.inline_asm_elementwise(asm, _OUT_8, of_8, gl.float32, is_pure=True, pack=4)
    else:
        of_4 = [words, x, less, acc]
        total = gl.inline_asm_elementwise(asm, _OUT_4, of_4, gl.float32, is_pure=True, pack=4)
    return total


@gluon.jit
def _four(words: tensor) -> tensor:
    """A warp's chunk as four tensors [256, 4]: of each piece of 32 columns the first and the second half."""
    THREAD: constexpr = thread_layout()
    apart = gl.permute(gl.reshape(words, (8, 2, 2, 128)), (0, 3, 1, 2))
    first, second = gl.split(apart)
    first_0, first_1 = gl.split(first)
    second_0, second_1 = gl.split(second)
    return (
        gl.convert_layout(gl.reshape(first_0, (256, 4)), THREAD),
        gl.convert_layout(gl.reshape(second_0, (256, 4)), THREAD),
        gl.convert_layout(gl.reshape(first_1, (256, 4)), THREAD),
        gl.convert_layout(gl.reshape(second_1, (256, 4)), THREAD),
    )


@gluon.jit
def _less(pair: tensor) -> tensor:
    """Two rows' zeros [256] as -(128 + zero) in bf16, twice, [256, 4]."""
    second = (gl.arange(0, 4, gl.SliceLayout(0, thread_layout())) // 2)[None, :] + (pair[:, None] * 0).to(
        gl.int32
    )
    both = pair[:, None].to(gl.int32) + second * 0
    return gl.where(second == 0, both & 255, (both >> 8) & 255) * 0x00010001 - 0x3CFF3D00


@gluon.jit
def _beside(pair: tensor) -> tensor:
    """Two rows' scales [256] as factors of sums [256, 4]."""
    THREAD: constexpr = thread_layout()
    second = (gl.arange(0, 4, gl.SliceLayout(0, THREAD)) // 2)[None, :] + pair[:, None] * 0
    both = pair[:, None] + second * 0
    return gl.where(second == 0, both << 16, both & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def add_block(
    stage: tensor,
    x: tensor,
    scales: tensor,
    total: tensor,
    INDEX: constexpr,
    ZEROS: constexpr,
    LOOP: constexpr,
) -> tensor:
    """A block's sums [256, 4] plus a stage's products, once every warp has read the stage."""
    BITS: constexpr = LOOP.BITS
    PARTS: constexpr = 16 // BITS
    GROUPS: constexpr = 256 // LOOP.GROUP if LOOP.GROUP > 0 else 1
    EACH: constexpr = PARTS // GROUPS
    words = _four(stage.load(stage_layout()))
    for group in gl.static_range(GROUPS):
        part_sum = gl.zeros((256, 4), gl.float32, thread_layout()) if LOOP.GROUP > 0 else total
        if ZEROS:
            less = _less(scales[(INDEX * GROUPS + group) * 2 + 1])
        else:
            less = gl.full((256, 4), -0x3CF73CF8, gl.int32, thread_layout())  # -(128 + 8)
        for piece in gl.static_range(2):
            for half in gl.static_range(2):
                for each in gl.static_range(EACH):
                    part_sum = _product_of(
                        words[2 * piece + half],
                        x[2 * (group * EACH + each) + piece],
                        less,
                        part_sum,
                        group * EACH + each,
                        half,
                        LOOP,
                    )
        if LOOP.GROUP > 0:
            total += part_sum * _beside(scales[(INDEX * GROUPS + group) * (1 + ZEROS)])
        else:
            total = part_sum
    return total
