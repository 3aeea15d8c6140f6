"""Sums of a tile of the product by groups of warps on Hopper: by rows, by groups of columns, in blocks.

sums, slot, phase = sums_in_blocks(0, output, row, slot, phase, program, LOOP)   # [64, BLOCK_T]
"""

from __future__ import annotations

# mypy: disable-error-code="misc"
# (Names are bound again with other layouts in jitted code.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import constexpr, tensor
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ingot.kernels.product.int8.warpgroup_program import (
    COLUMNS,
    OUTPUTS,
    Program,
    next_slot,
    slot_before,
    steps_of,
)


@gluon.jit
def sums_by_rows(
    WHICH: constexpr, output: tensor, slot: tensor, phase: tensor, p: Program, LOOP: constexpr
) -> tensor:
    """A tile's exact sums, and the place of the step after it. A step's product starts before the one before
    has ended.
    """
    BLOCK_T: constexpr = LOOP.BLOCK_T
    L: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(BLOCK_T, 128), 32])
    LEFT: constexpr = gl.DotOperandLayout(0, L, 4)
    first_step, steps = steps_of(p)
    acc = warpgroup_mma_init(gl.full([OUTPUTS, BLOCK_T], 0, dtype=gl.int32, layout=L))
    if LOOP.FOUR > 0:
        outputs = output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LEFT))
        scale, zero = _level(first_step, outputs, p, LOOP)
        next_scale, next_zero = _level(first_step + 1, outputs, p, LOOP)
    for step in range(steps):
        own = p.weight_steps.index(slot * LOOP.GROUPS + WHICH)
        right = p.x_steps.index(slot).permute((1, 0))
        if LOOP.FOUR > 0:
            last_scale, last_zero = _level(first_step + step + 2, outputs, p, LOOP)
            mbarrier.wait(p.ready.index(slot), phase)
            pairs = own.load(LEFT)
            # The product before reads registers that are written next.
            sums, scale = warpgroup_mma_wait(0, deps=(acc, scale))
            acc = warpgroup_mma_init(sums)
            mbarrier.arrive(p.free.index(slot_before(slot, LOOP)), count=1, pred=step > 0)
            acc = warpgroup_mma(_unpacked(pairs, scale, zero, LEFT), right, acc, is_async=True)
            scale, zero, next_scale, next_zero = next_scale, next_zero, last_scale, last_zero
        else:
            mbarrier.wait(p.ready.index(slot), phase)
            acc = warpgroup_mma(own, right, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(p.free.index(slot_before(slot, LOOP)), count=1, pred=step > 0)
        slot, phase = next_slot(slot, phase, LOOP)
    sums = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(p.free.index(slot_before(slot, LOOP)), count=1)
    return sums, slot, phase


@gluon.jit
def sums_by_groups(
    WHICH: constexpr,
    output: tensor,
    row: tensor,
    slot: tensor,
    phase: tensor,
    p: Program,
    LOOP: constexpr,
) -> tensor:
    """A tile's sums in fp32, to which each step's exact sums are added with their rows' scales, and the place
    of the step after it; of a weight of 4 bits inside 8.
    """
    BLOCK_T: constexpr = LOOP.BLOCK_T
    L: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(BLOCK_T, 128), 32])
    LEFT: constexpr = gl.DotOperandLayout(0, L, 4)
    first_step, steps = steps_of(p)
    last = gl.cdiv(p.columns, COLUMNS) - 1
    rows = row + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, L))
    real = rows < p.rows
    scale_places = p.x.scales + rows.to(gl.int64) * p.x.scale_stride
    total = gl.full([OUTPUTS, BLOCK_T], 0.0, dtype=gl.float32, layout=L)
    outputs = output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LEFT))
    scale, zero = _level(first_step, outputs, p, LOOP)
    next_scale, next_zero = _level(first_step + 1, outputs, p, LOOP)
    for step in range(steps):
        x_scales = gl.load(scale_places + gl.minimum(first_step + step, last), mask=real, other=0.0)
        own = p.weight_steps.index(slot * LOOP.GROUPS + WHICH)
        right = p.x_steps.index(slot).permute((1, 0))
        acc = gl.full([OUTPUTS, BLOCK_T], 0, dtype=gl.int32, layout=L)
        last_scale, last_zero = _level(first_step + step + 2, outputs, p, LOOP)
        mbarrier.wait(p.ready.index(slot), phase)
        left = _unpacked(own.load(LEFT), scale, zero, LEFT)
        flying = warpgroup_mma(left, right, acc, use_acc=False, is_async=True)
        scale, zero, next_scale, next_zero = next_scale, next_zero, last_scale, last_zero
        sums = warpgroup_mma_wait(0, deps=(flying,))
        mbarrier.arrive(p.free.index(slot), count=1)
        total += sums.to(gl.float32) * x_scales[None, :]
        slot, phase = next_slot(slot, phase, LOOP)
    return total, slot, phase


@gluon.jit
def keep_scales(WHICH: constexpr, row: tensor, p: Program, LOOP: constexpr) -> None:
    """Copy the scales of BLOCK_T rows to shared memory, step after step: few lines are read there, where each
    step would read one line of memory per row.
    """
    KEPT: constexpr = LOOP.KEPT
    AT_ONCE: constexpr = 32
    L: constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    TURNED: constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    shape: constexpr = [LOOP.GROUPS * KEPT // AT_ONCE, AT_ONCE, LOOP.BLOCK_T]
    pieces = p.scales._reinterpret(gl.float32, shape, TURNED)
    rows = row + gl.arange(0, LOOP.BLOCK_T, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, L))
    first_step = steps_of(p)[0]
    last = gl.cdiv(p.columns, COLUMNS)
    for piece in gl.static_range(KEPT // AT_ONCE):
        group = first_step + piece * AT_ONCE + columns
        inside = (rows < p.rows)[:, None] & (group < last)[None, :]
        places = p.x.scales + (rows * p.x.scale_stride)[:, None] + group[None, :]
        scales = gl.load(places, mask=inside, other=0.0)
        pieces.index(WHICH * (KEPT // AT_ONCE) + piece).store(scales.permute((1, 0)))


@gluon.jit
def _scales(
    WHICH: constexpr, row: tensor, output: tensor, step: tensor, p: Program, LOOP: constexpr
) -> tensor:
    """Scales of a part's step of BLOCK_T rows [BLOCK_T], times that of the weight's block; past the last
    column those of other columns.
    """
    L: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(LOOP.BLOCK_T, 128), 32])
    first_step = steps_of(p)[0]
    group = gl.minimum(first_step + step, gl.cdiv(p.columns, COLUMNS) - 1)
    own = gl.minimum(output, p.outputs - 1) // COLUMNS * p.weight.level_stride
    block = gl.load(p.weight.scales + own + group)
    if LOOP.KEPT > 0:
        scales = p.scales.index(WHICH * LOOP.KEPT + step).load(gl.SliceLayout(0, L))
    else:
        rows = row + gl.arange(0, LOOP.BLOCK_T, layout=gl.SliceLayout(0, L))
        places = p.x.scales + rows * p.x.scale_stride + group
        scales = gl.load(places, mask=rows < p.rows, other=0.0)
    return scales * block


@gluon.jit
def sums_in_blocks(
    WHICH: constexpr,
    output: tensor,
    row: tensor,
    slot: tensor,
    phase: tensor,
    p: Program,
    LOOP: constexpr,
) -> tensor:
    """A tile's sums in fp32, to which each step's sums of e4m3 are added with the scales of their rows and of
    the weight's block, and the place of the step after it.
    """
    BLOCK_T: constexpr = LOOP.BLOCK_T
    L: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(BLOCK_T, 128), 32])
    steps = steps_of(p)[1]
    total = gl.full([OUTPUTS, BLOCK_T], 0.0, dtype=gl.float32, layout=L)
    for step in range(steps):
        scales = _scales(WHICH, row, output, step, p, LOOP)
        own = p.weight_steps.index(slot * LOOP.GROUPS + WHICH)
        right = p.x_steps.index(slot).permute((1, 0))
        acc = gl.full([OUTPUTS, BLOCK_T], 0.0, dtype=gl.float32, layout=L)
        mbarrier.wait(p.ready.index(slot), phase)
        flying = warpgroup_mma(own, right, acc, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(flying,))
        mbarrier.arrive(p.free.index(slot), count=1)
        total += sums * scales[None, :]
        slot, phase = next_slot(slot, phase, LOOP)
    return total, slot, phase


@gluon.jit
def _level(step: tensor, outputs: tensor, p: Program, LOOP: constexpr) -> tensor:
    """The steps and zeros of 64 outputs in a step's columns, those of the last group past it."""
    group = gl.minimum(step, gl.cdiv(p.columns, LOOP.FOUR) - 1)
    place = group * p.weight.level_stride + outputs
    inside = outputs < p.outputs
    scale = gl.load(p.weight.steps + place, mask=inside, other=0).to(gl.int32)
    zero = gl.load(p.weight.zeros + place, mask=inside, other=0).to(gl.int32)
    return scale, zero


@gluon.jit
def _unpacked(pairs: tensor, scale: tensor, zero: tensor, LEFT: constexpr) -> tensor:
    """Bytes (q - zero) · scale [64, 128] of pairs [64, 64], as the product's left operand.

    With 128 more a value is within 0 … 255, so no byte carries into the next one, and one multiplication and
    addition serves four of them. The highest bit takes the 128 away.
    """
    LOW: constexpr = """{ .reg .b32 a;
        and.b32 a, $1, 0x0F0F0F0F;
        mad.lo.u32 a, a, $2, $6;
        xor.b32 $0, a, 0x80808080; }"""
    HIGH: constexpr = """{ .reg .b32 a;
        shr.u32 a, $1, 4;
        and.b32 a, a, 0x0F0F0F0F;
        mad.lo.u32 a, a, $2, $6;
        xor.b32 $0, a, 0x80808080; }"""
    REGISTERS: constexpr = "=r,r,r,r,r,r,r,r,r,r"  # four bytes; four times scale, of one output; likewise
    shift = ((128 - zero * scale) * 0x01010101)[:, None]
    sides = [pairs, scale[:, None], shift]
    low = gl.inline_asm_elementwise(LOW, REGISTERS, sides, dtype=gl.int8, is_pure=True, pack=4)
    high = gl.inline_asm_elementwise(HIGH, REGISTERS, sides, dtype=gl.int8, is_pure=True, pack=4)
    both = gl.join(low, high).permute((0, 2, 1)).reshape([OUTPUTS, COLUMNS])
    return gl.convert_layout(both, LEFT)
