"""The kernel of prompt_gate_up.py: one warp of a program copies rows and weights to shared memory, two or
three groups of four warps multiply 64 rows of a tile each.

Three groups read a fifth less from L2 per product than two. Where tiles of 192 rows would leave programs idle
at the end, the last rows are tiles of 128, in which the third group waits.

    prompt_gate_up_kernel[(programs,)](x_desc, w_desc, y_desc, None, rows, outputs, columns, tall, LOOP)
"""

from __future__ import annotations

# mypy: disable-error-code="misc"
# (Names are bound again with other layouts in jitted code.)
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language import constexpr, tensor

from ingot.kernels.product.prompt_epilogue import quarters, store_bent, store_gated

ROWS = gl.constexpr(64)  # of a group of four warps
OUTPUTS = gl.constexpr(128)  # of a tile: as many sums of the gate, and of up
COLS = gl.constexpr(64)  # of a step
QUARTERS = gl.constexpr(4)  # of 256 outputs: as wide as a step


class DenseLoop(NamedTuple):
    """The kernel's constants.

    Attributes:
        GROUPS: of four warps, two or three: 64 rows of a tile each.
        STAGES: steps in shared memory.
        SPAN: tiles of rows that are done for one tile of outputs before the next.
    """

    GROUPS: int
    STAGES: int
    SPAN: int


class Sizes(NamedTuple):
    """Rows, the activation's width, the columns that are summed, and the tiles of rows with all groups."""

    rows: Any
    outputs: Any
    columns: Any
    tall: Any


@gluon.jit
def _short(sizes: Sizes, LOOP: constexpr) -> tensor:
    """How many tiles of rows have two groups."""
    return gl.cdiv(gl.maximum(sizes.rows - sizes.tall * (LOOP.GROUPS * ROWS), 0), 2 * ROWS)


@gluon.jit
def _tiles(sizes: Sizes, WIDTH: constexpr, LOOP: constexpr) -> tensor:
    """How many tiles of so many outputs there are."""
    return (sizes.tall + _short(sizes, LOOP)) * (sizes.outputs // WIDTH)


@gluon.jit
def _corner(tile: tensor, sizes: Sizes, WIDTH: constexpr, LOOP: constexpr) -> tensor:
    """A tile's first row and output, and whether all groups have rows of it."""
    across = sizes.outputs // WIDTH
    full = tile < sizes.tall * across
    begun = gl.where(full, 0, sizes.tall * (LOOP.GROUPS * ROWS))
    height = gl.where(full, LOOP.GROUPS * ROWS, 2 * ROWS)
    count = gl.where(full, sizes.tall, _short(sizes, LOOP))
    tile -= gl.where(full, 0, sizes.tall * across)
    per = across * LOOP.SPAN
    first = tile // per * LOOP.SPAN
    turn = gl.minimum(count - first, LOOP.SPAN)
    return begun + (first + tile % per % turn) * height, tile % per // turn * WIDTH, full


@gluon.jit
def _next(slot: tensor, phase: tensor, LOOP: constexpr) -> tensor:
    """The next step's place in shared memory."""
    slot += 1
    if slot == LOOP.STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _copy(everything: tensor, LOOP: constexpr) -> None:
    """Copy the operands of every step, as soon as their place in shared memory is free."""
    x_desc, w_desc, _y_desc, bias_ptr, xs, ws, _staged, ready, free, sizes = everything
    GROUPS: constexpr = LOOP.GROUPS
    BYTES: constexpr = (2 * ROWS + 2 * OUTPUTS) * COLS * 2
    MORE: constexpr = (GROUPS - 2) * ROWS * COLS * 2
    WIDTH: constexpr = OUTPUTS if bias_ptr is None else 2 * OUTPUTS
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), _tiles(sizes, WIDTH, LOOP), gl.num_programs(0)):
        row, output, full = _corner(tile, sizes, WIDTH, LOOP)
        columns = sizes.columns if bias_ptr is None else gl.maximum(sizes.columns, QUARTERS * COLS)
        other = output + (sizes.outputs if bias_ptr is None else OUTPUTS)
        for column in range(0, columns, COLS):
            mbarrier.wait(free.index(slot), phase)
            bar = ready.index(slot)
            if GROUPS == 3:
                mbarrier.expect(bar, BYTES + MORE, pred=full)
                mbarrier.expect(bar, BYTES, pred=full == 0)
            else:
                mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(x_desc, [row, column], bar, xs.index(GROUPS * slot))
            tma.async_copy_global_to_shared(w_desc, [output, column], bar, ws.index(2 * slot))
            tma.async_copy_global_to_shared(w_desc, [other, column], bar, ws.index(2 * slot + 1))
            tma.async_copy_global_to_shared(x_desc, [row + ROWS, column], bar, xs.index(GROUPS * slot + 1))
            if GROUPS == 3:
                place = xs.index(GROUPS * slot + 2)
                tma.async_copy_global_to_shared(x_desc, [row + 2 * ROWS, column], bar, place, pred=full)
            slot, phase = _next(slot, phase, LOOP)


@gluon.jit
def _started(
    WHICH: constexpr,
    slot: tensor,
    phase: tensor,
    acc: tensor,
    use_acc: tensor,
    everything: tensor,
    LOOP: constexpr,
) -> tensor:
    """Start a step's product, once its operands are there."""
    _x_desc, w_desc, _y_desc, _bias_ptr, xs, ws, _staged, ready, _free, _sizes = everything
    both = ws._reinterpret(w_desc.dtype, [LOOP.STAGES, 2 * OUTPUTS, COLS], w_desc.layout)
    mbarrier.wait(ready.index(slot), phase)
    right = both.index(slot).permute((1, 0))
    left = xs.index(LOOP.GROUPS * slot + WHICH)
    return warpgroup_mma(left, right, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _multiply(WHICH: constexpr, everything: tensor, LOOP: constexpr) -> None:
    """One group's rows, tile by tile. A step's product starts before the one before has ended. GELU of a
    plain MLP's tile is computed beside the first products of the next one: a quarter beside each.
    """
    _x_desc, _w_desc, y_desc, bias_ptr, _xs, _ws, staged, _ready, free, sizes = everything
    DTYPE: constexpr = y_desc.dtype
    BENT: constexpr = bias_ptr is not None
    WIDTH: constexpr = 2 * OUTPUTS if BENT else OUTPUTS
    FIRST: constexpr = QUARTERS if BENT else 0
    # The compiler counts too few registers for one product of all outputs by three groups.
    PRODUCT: constexpr = 2 * OUTPUTS if LOOP.GROUPS == 2 else OUTPUTS
    MMA: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PRODUCT, 16])
    slot = 0
    phase = 0
    before = slot
    acc = warpgroup_mma_init(gl.zeros([ROWS, 2 * OUTPUTS], gl.float32, MMA))
    if BENT:
        parts = quarters(gl.zeros([ROWS, 2 * OUTPUTS], DTYPE, MMA))
        last_row = sizes.rows
        last_output = sizes.outputs
    for tile in range(gl.program_id(0), _tiles(sizes, WIDTH, LOOP), gl.num_programs(0)):
        row, output, full = _corner(tile, sizes, WIDTH, LOOP)
        row += WHICH * ROWS
        for part in gl.static_range(FIRST):
            acc = _started(WHICH, slot, phase, acc, part > 0, everything, LOOP)
            if last_row < sizes.rows:
                piece = staged.index(2 * WHICH + part % 2)
                store_bent(parts[part], y_desc, piece, last_row, last_output + part * COLS)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            if part > 0:
                mbarrier.arrive(free.index(before), count=1)
            before = slot
            slot, phase = _next(slot, phase, LOOP)
        columns = sizes.columns
        if WHICH == 2:
            columns = gl.where(full, columns, 0)
        for column in range(FIRST * COLS, columns, COLS):
            later = True if BENT else column > 0
            acc = _started(WHICH, slot, phase, acc, later, everything, LOOP)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(free.index(before), count=1, pred=later)
            before = slot
            slot, phase = _next(slot, phase, LOOP)
        if BENT:
            bias = gl.load(bias_ptr + output + gl.arange(0, 2 * OUTPUTS, layout=gl.SliceLayout(0, MMA)))
        sums = warpgroup_mma_wait(0, deps=(acc,))
        acc = warpgroup_mma_init(sums)
        if WHICH == 2:
            mbarrier.arrive(free.index(before), count=1, pred=full)
            slot, phase = _passed(slot, phase, sizes.columns - columns, everything, LOOP)
        else:
            mbarrier.arrive(free.index(before), count=1)
        if BENT:
            parts = quarters((sums + bias.to(gl.float32)[None, :]).to(DTYPE))
            last_row = row
            last_output = output
        elif WHICH < 2 or full:
            store_gated(sums, y_desc, staged.index(WHICH), row, output)
    if BENT and last_row < sizes.rows:
        for part in gl.static_range(QUARTERS):
            piece = staged.index(2 * WHICH + part % 2)
            store_bent(parts[part], y_desc, piece, last_row, last_output + part * COLS)
    tma.store_wait(0)


@gluon.jit
def _passed(slot: tensor, phase: tensor, columns: tensor, everything: tensor, LOOP: constexpr) -> tensor:
    """The place after the steps of so many columns, of which a group has no rows."""
    _x_desc, _w_desc, _y_desc, _bias_ptr, _xs, _ws, _staged, ready, free, _sizes = everything
    for _column in range(0, columns, COLS):
        mbarrier.wait(ready.index(slot), phase)
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = _next(slot, phase, LOOP)
    return slot, phase


@gluon.jit
def _first(everything: tensor, LOOP: constexpr) -> None:
    _multiply(0, everything, LOOP)


@gluon.jit
def _second(everything: tensor, LOOP: constexpr) -> None:
    _multiply(1, everything, LOOP)


@gluon.jit
def _third(everything: tensor, LOOP: constexpr) -> None:
    _multiply(2, everything, LOOP)


@gluon.jit(do_not_specialize=["rows", "tall"])
def prompt_gate_up_kernel(
    x_desc: tensor,
    w_desc: tensor,
    y_desc: tensor,
    bias_ptr: tensor,
    rows: tensor,
    outputs: tensor,
    columns: tensor,
    tall: tensor,
    LOOP: constexpr,
) -> None:
    """Tiles of 128 gated outputs, or of 256 plain ones, as far apart as there are programs."""
    STAGES: constexpr = LOOP.STAGES
    GROUPS: constexpr = LOOP.GROUPS
    xs = gl.allocate_shared_memory(x_desc.dtype, [GROUPS * STAGES, ROWS, COLS], x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, OUTPUTS, COLS], w_desc.layout)
    WIDTH: constexpr = OUTPUTS if bias_ptr is None else COLS
    staged = gl.allocate_shared_memory(y_desc.dtype, [GROUPS * OUTPUTS // WIDTH, ROWS, WIDTH], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    sizes = Sizes(rows, outputs, columns, tall)
    everything = (x_desc, w_desc, y_desc, bias_ptr, xs, ws, staged, ready, free, sizes)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_first, (everything, LOOP)),
                (_second, (everything, LOOP)),
                (_third, (everything, LOOP)),
                (_copy, (everything, LOOP)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [(_first, (everything, LOOP)), (_second, (everything, LOOP)), (_copy, (everything, LOOP))],
            [4, 1],
            [240, 24],
        )
