"""The product of rows and a weight in 8 bits on Hopper with its sums in flight: y^T = W · x^T, in Gluon.

One warp of a program only asks for operands (TMA). Every other group of four warps has 64 outputs of a tile
and BLOCK_T rows: it issues the products of a step (`wgmma`) before those of the step before have ended, and
scales and stores its sums while the other groups multiply. A weight of 4 bits inside 8 becomes bytes in
registers, which are the product's left operand. warpgroup_matmul.py launches it.

    warpgroup_kernel[grid](*descriptors, x, weight, out, rows, outputs, columns, LOOP=loop, REGISTERS=232)
"""

from __future__ import annotations

# mypy: disable-error-code="misc"
# (Names are bound again with other layouts in jitted code.)
import inspect
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import constexpr, tensor
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ingot.kernels.product.int8 import int8_epilogue
from ingot.kernels.product.product_arguments import Sums

OUTPUTS = constexpr(64)  # of a group of four warps
COLUMNS = constexpr(128)  # of a step
STRAIGHT = constexpr(32)  # rows that are stored at once without shared memory
LOAD_REGISTERS = constexpr(24)  # per thread of the warp that asks for operands
# Triton changed how a kernel names its groups of warps; both forms are accepted.
LISTED = constexpr("functions_and_args" in inspect.signature(gl.warp_specialize).parameters)
ended = gluon.jit(int8_epilogue.ended.fn)


class WarpLoop(NamedTuple):
    """The kernel's constants.

    Attributes:
        FOUR: columns per group of a weight of 4 bits inside 8; 0: the weight is int8.
        GROUP: columns of a row that share a scale, those of a step; 0: the whole row.
        GROUPS: groups of four warps that multiply, up to 3.
        BLOCK_T: rows of a tile.
        STAGES: steps in shared memory.
        PIECE: rows of a tile that are stored at once; 0: they go straight from registers.
        TOGETHER: tiles of rows that are done for one tile of outputs before the next.
        OVERLAP: launch_overlap.py.
    """

    FOUR: int
    GROUP: int
    GROUPS: int
    BLOCK_T: int
    STAGES: int
    PIECE: int
    TOGETHER: int
    OVERLAP: int


class WarpRows(NamedTuple):
    """The rows' scales and their row stride."""

    scales: Any
    scale_stride: Any


class WarpWeight(NamedTuple):
    """The weight's scales; of 4 bits inside 8 also steps, zeros and the elements between their groups."""

    scales: Any
    steps: Any = None
    zeros: Any = None
    level_stride: Any = None


class Program(NamedTuple):
    """What all warps of a program share: arguments, sizes, and in shared memory the steps' operands with
    barriers when they are there and when they are no longer needed, and pieces to store with theirs.
    """

    x_source: Any
    weight_source: Any
    y_pieces: Any
    residual_pieces: Any
    x: Any
    weight: Any
    out: Any
    rows: Any
    outputs: Any
    columns: Any
    x_steps: Any
    weight_steps: Any
    ready: Any
    free: Any
    pieces: Any
    added: Any


@gluon.jit
def _start_next(OVERLAP: constexpr) -> None:
    if OVERLAP > 1:
        asm: constexpr = "griddepcontrol.launch_dependents; // $0"
        gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_for_previous(OVERLAP: constexpr) -> None:
    if OVERLAP > 1:
        asm: constexpr = "griddepcontrol.wait; // $0"
        gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _num_tiles(p: Program, LOOP: constexpr) -> tensor:
    return gl.cdiv(p.rows, LOOP.BLOCK_T) * gl.cdiv(p.outputs, OUTPUTS * LOOP.GROUPS)


@gluon.jit
def _corner(tile: tensor, p: Program, LOOP: constexpr) -> tensor:
    """A tile's first output and row."""
    TOGETHER: constexpr = LOOP.TOGETHER
    tiles_n = gl.cdiv(p.outputs, OUTPUTS * LOOP.GROUPS)
    band = tile // (TOGETHER * tiles_n)
    height = gl.minimum(gl.cdiv(p.rows, LOOP.BLOCK_T) - band * TOGETHER, TOGETHER)
    place = tile - band * TOGETHER * tiles_n
    return place // height * (OUTPUTS * LOOP.GROUPS), (band * TOGETHER + place % height) * LOOP.BLOCK_T


@gluon.jit
def _steps(p: Program) -> tensor:
    """A part's first step, and how many it has."""
    steps = gl.cdiv(gl.cdiv(p.columns, COLUMNS), gl.num_programs(1))
    return gl.program_id(1) * steps, steps


@gluon.jit
def _next_slot(slot: tensor, phase: tensor, LOOP: constexpr) -> tensor:
    slot += 1
    if slot == LOOP.STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _before(slot: tensor, LOOP: constexpr) -> tensor:
    """The slot before. (Triton does not carry a loop's variable that starts as another one's copy.)"""
    before = slot - 1
    if before < 0:
        before = LOOP.STAGES - 1
    return before


@gluon.jit
def _load(p: Program, LOOP: constexpr) -> None:
    """Ask for the operands of every step, as soon as their place in shared memory is free."""
    GROUPS: constexpr = LOOP.GROUPS
    WIDTH: constexpr = COLUMNS // 2 if LOOP.FOUR > 0 else COLUMNS
    BYTES: constexpr = LOOP.BLOCK_T * COLUMNS + OUTPUTS * GROUPS * WIDTH
    first_step, steps = _steps(p)
    _wait_for_previous(LOOP.OVERLAP)  # before the weight too: it may be a temporary
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), _num_tiles(p, LOOP), gl.num_programs(0)):
        output, row = _corner(tile, p, LOOP)
        for step in range(first_step, first_step + steps):
            mbarrier.wait(p.free.index(slot), phase)
            bar = p.ready.index(slot)
            mbarrier.expect(bar, BYTES)
            for g in gl.static_range(GROUPS):
                place = [output + g * OUTPUTS, step * WIDTH]
                tma.async_copy_global_to_shared(
                    p.weight_source, place, bar, p.weight_steps.index(slot * GROUPS + g)
                )
            tma.async_copy_global_to_shared(p.x_source, [row, step * COLUMNS], bar, p.x_steps.index(slot))
            slot, phase = _next_slot(slot, phase, LOOP)


@gluon.jit
def _multiply(WHICH: constexpr, p: Program, LOOP: constexpr) -> None:
    """Sums of 64 outputs and BLOCK_T rows, tile by tile."""
    BUFFERS: constexpr = 2 if LOOP.BLOCK_T > LOOP.PIECE else 1
    # A buffer's barrier changes its phase with every piece of a tile that it holds.
    TURN: constexpr = 1 if LOOP.BLOCK_T <= 2 * LOOP.PIECE else 0
    _wait_for_previous(LOOP.OVERLAP)
    slot = 0
    phase = 0
    turn = 0
    for tile in range(gl.program_id(0), _num_tiles(p, LOOP), gl.num_programs(0)):
        output, row = _corner(tile, p, LOOP)
        output += WHICH * OUTPUTS
        if LOOP.GROUP > 0:
            sums, slot, phase = _by_groups(WHICH, output, row, slot, phase, p, LOOP)
        else:
            sums, slot, phase = _by_rows(WHICH, output, slot, phase, p, LOOP)
        _store(sums, output, row, WHICH * BUFFERS, turn, p, LOOP)
        turn ^= TURN
    tma.store_wait(0)


@gluon.jit
def _by_rows(
    WHICH: constexpr, output: tensor, slot: tensor, phase: tensor, p: Program, LOOP: constexpr
) -> tensor:
    """A tile's exact sums, and the place of the step after it. A step's product starts before the one before
    has ended.
    """
    BLOCK_T: constexpr = LOOP.BLOCK_T
    L: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(BLOCK_T, 128), 32])
    LEFT: constexpr = gl.DotOperandLayout(0, L, 4)
    first_step, steps = _steps(p)
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
            mbarrier.arrive(p.free.index(_before(slot, LOOP)), count=1, pred=step > 0)
            acc = warpgroup_mma(_unpacked(pairs, scale, zero, LEFT), right, acc, is_async=True)
            scale, zero, next_scale, next_zero = next_scale, next_zero, last_scale, last_zero
        else:
            mbarrier.wait(p.ready.index(slot), phase)
            acc = warpgroup_mma(own, right, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(p.free.index(_before(slot, LOOP)), count=1, pred=step > 0)
        slot, phase = _next_slot(slot, phase, LOOP)
    sums = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(p.free.index(_before(slot, LOOP)), count=1)
    return sums, slot, phase


@gluon.jit
def _by_groups(
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
    first_step, steps = _steps(p)
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
        slot, phase = _next_slot(slot, phase, LOOP)
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


@gluon.jit
def _store(
    sums: tensor,
    output: tensor,
    row: tensor,
    BUFFER: constexpr,
    turn: tensor,
    p: Program,
    LOOP: constexpr,
) -> None:
    """End sums and store them, in pieces, whose two buffers take turns."""
    WIDTH: constexpr = sums.shape[1]
    if LOOP.PIECE == 0 and WIDTH <= STRAIGHT:
        _store_straight(sums, output, row, p, LOOP)
    elif WIDTH == LOOP.PIECE:
        _store_piece(sums, output, row, BUFFER, turn, p, LOOP)
    else:
        HALF: constexpr = WIDTH // 2
        L: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(HALF, 128), 32])
        NEXT: constexpr = BUFFER + 1 if HALF == LOOP.PIECE else BUFFER
        AGAIN: constexpr = 1 if HALF == 2 * LOOP.PIECE else 0
        low, high = gl.split(sums.reshape([OUTPUTS, 2, HALF]).permute((0, 2, 1)))
        _store(gl.convert_layout(low, L), output, row, BUFFER, turn, p, LOOP)
        _store(gl.convert_layout(high, L), output, row + HALF, NEXT, turn ^ AGAIN, p, LOOP)


@gluon.jit
def _axes(output: tensor, row: tensor, WIDTH: constexpr) -> tensor:
    """Outputs and rows of sums [64, WIDTH]."""
    L: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(WIDTH, 128), 32])
    outputs = output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, L))
    return outputs, row + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))


@gluon.jit
def _ended(
    sums: tensor, residual: tensor, outputs: tensor, rows: tensor, p: Program, LOOP: constexpr
) -> tensor:
    real, wanted = rows < p.rows, outputs < p.outputs
    x_scales, bias = None, None
    if LOOP.GROUP == 0:
        x_scales = gl.load(p.x.scales + rows * p.x.scale_stride, mask=real, other=0.0)[None, :]
    weight_scales = gl.load(p.weight.scales + outputs, mask=wanted, other=0.0)[:, None]
    if p.out.bias is not None:
        bias = gl.load(p.out.bias + outputs, mask=wanted, other=0.0)[:, None]
    return ended(sums, x_scales, weight_scales, bias, residual, p.out.y.dtype.element_ty)


@gluon.jit
def _store_straight(sums: tensor, output: tensor, row: tensor, p: Program, LOOP: constexpr) -> None:
    """Registers to memory: int32 sums as they are, others ended."""
    outputs, rows = _axes(output, row, sums.shape[1])
    inside = (outputs < p.outputs)[:, None] & (rows < p.rows)[None, :]
    if p.out.y.dtype.element_ty == gl.int32:
        y = sums
    else:
        residual = None
        if p.out.residual is not None:
            places = (rows.to(gl.int64) * p.out.residual_stride)[None, :] + outputs[:, None]
            residual = gl.load(p.out.residual + places, mask=inside, other=0.0)
        y = _ended(sums, residual, outputs, rows, p, LOOP)
    y_rows = gl.program_id(1).to(gl.int64) * p.rows + rows
    gl.store(p.out.y + (y_rows * p.outputs)[None, :] + outputs[:, None], y, mask=inside)


@gluon.jit
def _store_piece(
    sums: tensor,
    output: tensor,
    row: tensor,
    BUFFER: constexpr,
    turn: tensor,
    p: Program,
    LOOP: constexpr,
) -> None:
    """Through shared memory, which turns rows and outputs; the residual comes the same way."""
    WIDTH: constexpr = sums.shape[1]
    outputs, rows = _axes(output, row, WIDTH)
    piece = p.pieces.index(BUFFER)
    tma.store_wait(1 if LOOP.BLOCK_T > LOOP.PIECE else 0)  # the buffer has been read
    residual = None
    if p.out.residual is not None:
        bar = p.added.index(BUFFER)
        mbarrier.expect(bar, WIDTH * OUTPUTS * 2)
        tma.async_copy_global_to_shared(p.residual_pieces, [row, output], bar, piece)
        mbarrier.wait(bar, turn)
        TURNED: constexpr = sums.permute((1, 0)).type.layout
        residual = gl.convert_layout(piece.load(TURNED).permute((1, 0)), sums.type.layout)
    piece.store(_ended(sums, residual, outputs, rows, p, LOOP).permute((1, 0)))
    fence_async_shared()
    tma.async_copy_shared_to_global(p.y_pieces, [row, output], piece)


@gluon.jit
def _first(p: Program, LOOP: constexpr) -> None:
    _multiply(0, p, LOOP)


@gluon.jit
def _second(p: Program, LOOP: constexpr) -> None:
    _multiply(1, p, LOOP)


@gluon.jit
def _third(p: Program, LOOP: constexpr) -> None:
    _multiply(2, p, LOOP)


@gluon.jit(do_not_specialize=["rows"])
def warpgroup_kernel(
    x_source: tensor,
    weight_source: tensor,
    y_pieces: tensor,
    residual_pieces: tensor,
    x: tensor,
    weight: tensor,
    out: tensor,
    rows: tensor,
    outputs: tensor,
    columns: tensor,
    LOOP: constexpr,
    REGISTERS: constexpr,
) -> None:
    """Tiles of BLOCK_T rows and 64 outputs per group of warps, as far apart as there are programs; with
    parts of their sums by programs of the grid's second axis, with equally many steps, the last ones past the
    end. REGISTERS: per thread
    that multiplies. Sources and pieces are descriptors (which a launch cannot take inside a tuple).
    """
    x, weight, out = WarpRows(*x), WarpWeight(*weight), Sums(*out)
    GROUPS: constexpr = LOOP.GROUPS
    STAGES: constexpr = LOOP.STAGES
    WIDTH: constexpr = COLUMNS // 2 if LOOP.FOUR > 0 else COLUMNS
    _start_next(LOOP.OVERLAP)
    x_steps = gl.allocate_shared_memory(gl.int8, [STAGES, LOOP.BLOCK_T, COLUMNS], x_source.layout)
    weight_steps = gl.allocate_shared_memory(
        weight_source.dtype, [STAGES * GROUPS, OUTPUTS, WIDTH], weight_source.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [2 * GROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    for i in gl.static_range(2 * GROUPS):
        mbarrier.init(added.index(i), count=1)
    fence_async_shared()
    if LOOP.PIECE > 0:
        BUFFERS: constexpr = 2 if LOOP.BLOCK_T > LOOP.PIECE else 1
        pieces = gl.allocate_shared_memory(
            out.y.dtype.element_ty, [BUFFERS * GROUPS, LOOP.PIECE, OUTPUTS], y_pieces.layout
        )
    else:
        pieces = added
    p = Program(
        x_source,
        weight_source,
        y_pieces,
        residual_pieces,
        x,
        weight,
        out,
        rows,
        outputs,
        columns,
        x_steps,
        weight_steps,
        ready,
        free,
        pieces,
        added,
    )
    if LISTED:
        if GROUPS == 1:
            gl.warp_specialize([(_first, (p, LOOP)), (_load, (p, LOOP))], [1], [LOAD_REGISTERS])
        elif GROUPS == 2:
            gl.warp_specialize(
                [(_first, (p, LOOP)), (_second, (p, LOOP)), (_load, (p, LOOP))],
                [4, 1],
                [REGISTERS, LOAD_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [(_first, (p, LOOP)), (_second, (p, LOOP)), (_third, (p, LOOP)), (_load, (p, LOOP))],
                [4, 4, 1],
                [REGISTERS, REGISTERS, LOAD_REGISTERS],
            )
