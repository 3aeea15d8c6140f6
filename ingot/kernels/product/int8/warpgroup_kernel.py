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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import constexpr, tensor
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from ingot.kernels.gluon_overlap import start_next, wait_for_previous
from ingot.kernels.product.int8 import int8_epilogue
from ingot.kernels.product.int8.warpgroup_program import (
    COLUMNS,
    OUTPUTS,
    Program,
    WarpRows,
    WarpWeight,
    corner,
    next_slot,
    num_tiles,
    steps_of,
)
from ingot.kernels.product.int8.warpgroup_sums import (
    keep_scales,
    sums_by_groups,
    sums_by_rows,
    sums_in_blocks,
)
from ingot.kernels.product.product_arguments import Sums

STRAIGHT = constexpr(32)  # rows that are stored at once without shared memory
LOAD_REGISTERS = constexpr(24)  # per thread of the warp that asks for operands
# Triton changed how a kernel names its groups of warps; both forms are accepted.
LISTED = constexpr("functions_and_args" in inspect.signature(gl.warp_specialize).parameters)
ended = gluon.jit(int8_epilogue.ended.fn)


@gluon.jit
def _load_weight(output: tensor, step: tensor, slot: tensor, p: Program, LOOP: constexpr) -> None:
    """Ask for a step of a tile's weight."""
    WIDTH: constexpr = COLUMNS // 2 if LOOP.FOUR > 0 else COLUMNS
    GROUPS: constexpr = LOOP.GROUPS
    for g in gl.static_range(GROUPS):
        place = [output + g * OUTPUTS, step * WIDTH]
        own = p.weight_steps.index(slot * GROUPS + g)
        tma.async_copy_global_to_shared(p.weight_source, place, p.ready.index(slot), own)


@gluon.jit
def _load(p: Program, LOOP: constexpr) -> None:
    """Ask for the operands of every step, as soon as their place in shared memory is free."""
    GROUPS: constexpr = LOOP.GROUPS
    WIDTH: constexpr = COLUMNS // 2 if LOOP.FOUR > 0 else COLUMNS
    BYTES: constexpr = LOOP.BLOCK_T * COLUMNS + OUTPUTS * GROUPS * WIDTH
    first_step, steps = steps_of(p)
    slot = 0
    phase = 1
    start = 0
    if LOOP.EARLY:
        output, row = corner(gl.program_id(0), p, LOOP)
        start = gl.minimum(steps, LOOP.STAGES)
        for early in range(start):
            mbarrier.expect(p.ready.index(early), BYTES)
            _load_weight(output, first_step + early, early, p, LOOP)
        wait_for_previous(LOOP.OVERLAP)
        for early in range(start):
            place = [row, (first_step + early) * COLUMNS]
            tma.async_copy_global_to_shared(p.x_source, place, p.ready.index(early), p.x_steps.index(early))
            slot, phase = next_slot(slot, phase, LOOP)
    else:
        wait_for_previous(LOOP.OVERLAP)  # before the weight too: it may be a temporary
    for tile in range(gl.program_id(0), num_tiles(p, LOOP), gl.num_programs(0)):
        output, row = corner(tile, p, LOOP)
        for step in range(first_step + start, first_step + steps):
            mbarrier.wait(p.free.index(slot), phase)
            bar = p.ready.index(slot)
            mbarrier.expect(bar, BYTES)
            _load_weight(output, step, slot, p, LOOP)
            tma.async_copy_global_to_shared(p.x_source, [row, step * COLUMNS], bar, p.x_steps.index(slot))
            slot, phase = next_slot(slot, phase, LOOP)
        start = 0


@gluon.jit
def _multiply(WHICH: constexpr, p: Program, LOOP: constexpr) -> None:
    """Sums of 64 outputs and BLOCK_T rows, tile by tile."""
    BUFFERS: constexpr = 2 if LOOP.BLOCK_T > LOOP.PIECE else 1
    # A buffer's barrier changes its phase with every piece of a tile that it holds.
    TURN: constexpr = 1 if LOOP.BLOCK_T <= 2 * LOOP.PIECE else 0
    wait_for_previous(LOOP.OVERLAP)
    slot = 0
    phase = 0
    turn = 0
    if LOOP.KEPT > 0:
        keep_scales(WHICH, 0, p, LOOP)
    for tile in range(gl.program_id(0), num_tiles(p, LOOP), gl.num_programs(0)):
        output, row = corner(tile, p, LOOP)
        output += WHICH * OUTPUTS
        if LOOP.GROUP > 0 and LOOP.FOUR == 0:
            sums, slot, phase = sums_in_blocks(WHICH, output, row, slot, phase, p, LOOP)
        elif LOOP.GROUP > 0:
            sums, slot, phase = sums_by_groups(WHICH, output, row, slot, phase, p, LOOP)
        else:
            sums, slot, phase = sums_by_rows(WHICH, output, slot, phase, p, LOOP)
        _store(sums, output, row, WHICH * BUFFERS, turn, p, LOOP)
        turn ^= TURN
    tma.store_wait(0)


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
    x_scales, weight_scales, bias = None, None, None
    if LOOP.GROUP == 0:
        x_scales = gl.load(p.x.scales + rows * p.x.scale_stride, mask=real, other=0.0)[None, :]
    if LOOP.GROUP == 0 or LOOP.FOUR > 0:
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
    end. REGISTERS: per thread that multiplies. Sources and pieces are descriptors (which a launch
    cannot take inside a tuple).
    """
    x, weight, out = WarpRows(*x), WarpWeight(*weight), Sums(*out)
    GROUPS: constexpr = LOOP.GROUPS
    STAGES: constexpr = LOOP.STAGES
    WIDTH: constexpr = COLUMNS // 2 if LOOP.FOUR > 0 else COLUMNS
    start_next(LOOP.OVERLAP)
    x_steps = gl.allocate_shared_memory(x_source.dtype, [STAGES, LOOP.BLOCK_T, COLUMNS], x_source.layout)
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
    scales = added
    if LOOP.KEPT > 0:
        FLAT: constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        scales = gl.allocate_shared_memory(gl.float32, [GROUPS * LOOP.KEPT, LOOP.BLOCK_T], FLAT)
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
        scales,
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
