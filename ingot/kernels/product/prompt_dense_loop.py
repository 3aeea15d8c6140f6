"""The kernel of prompt_gate_up.py: one warp of a program copies rows and weights to shared memory, two groups
of four warps multiply 64 rows of a tile each.

    prompt_gate_up_kernel[(programs,)](x_desc, w_desc, y_desc, None, rows, outputs, columns, num_warps=4)
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
STAGES = gl.constexpr(4)  # steps in shared memory
SPAN = gl.constexpr(16)  # tiles of rows that are done for one tile of outputs before the next


class Sizes(NamedTuple):
    """Rows, the activation's width and the columns that are summed."""

    rows: Any
    outputs: Any
    columns: Any


@gluon.jit
def _tiles(sizes: Sizes, WIDTH: constexpr) -> tensor:
    """How many tiles of so many outputs there are."""
    return gl.cdiv(sizes.rows, 2 * ROWS) * (sizes.outputs // WIDTH)


@gluon.jit
def _corner(tile: tensor, sizes: Sizes, WIDTH: constexpr) -> tensor:
    """A tile's first row and output."""
    per = sizes.outputs // WIDTH * SPAN
    first = tile // per * SPAN
    height = gl.minimum(gl.cdiv(sizes.rows, 2 * ROWS) - first, SPAN)
    return (first + tile % per % height) * (2 * ROWS), tile % per // height * WIDTH


@gluon.jit
def _next(slot: tensor, phase: tensor) -> tensor:
    """The next step's place in shared memory."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _copy(everything: tensor) -> None:
    """Copy the operands of every step, as soon as their place in shared memory is free."""
    x_desc, w_desc, _y_desc, bias_ptr, xs, ws, _staged, ready, free, sizes = everything
    BYTES: constexpr = (2 * ROWS + 2 * OUTPUTS) * COLS * 2
    slot = 0
    phase = 1
    WIDTH: constexpr = OUTPUTS if bias_ptr is None else 2 * OUTPUTS
    for tile in range(gl.program_id(0), _tiles(sizes, WIDTH), gl.num_programs(0)):
        row, output = _corner(tile, sizes, WIDTH)
        columns = sizes.columns if bias_ptr is None else gl.maximum(sizes.columns, QUARTERS * COLS)
        for column in range(0, columns, COLS):
            mbarrier.wait(free.index(slot), phase)
            bar = ready.index(slot)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(x_desc, [row, column], bar, xs.index(2 * slot))
            tma.async_copy_global_to_shared(w_desc, [output, column], bar, ws.index(2 * slot))
            other = output + (sizes.outputs if bias_ptr is None else OUTPUTS)
            tma.async_copy_global_to_shared(w_desc, [other, column], bar, ws.index(2 * slot + 1))
            tma.async_copy_global_to_shared(x_desc, [row + ROWS, column], bar, xs.index(2 * slot + 1))
            slot, phase = _next(slot, phase)


@gluon.jit
def _started(
    WHICH: constexpr, slot: tensor, phase: tensor, acc: tensor, use_acc: tensor, everything: tensor
) -> tensor:
    """Start a step's product, once its operands are there."""
    _x_desc, w_desc, _y_desc, _bias_ptr, xs, ws, _staged, ready, _free, _sizes = everything
    both = ws._reinterpret(w_desc.dtype, [STAGES, 2 * OUTPUTS, COLS], w_desc.layout)
    mbarrier.wait(ready.index(slot), phase)
    right = both.index(slot).permute((1, 0))
    return warpgroup_mma(xs.index(2 * slot + WHICH), right, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _multiply(WHICH: constexpr, everything: tensor) -> None:
    """One group's rows, tile by tile. A step's product starts before the one before has ended. GELU of a
    plain MLP's tile is computed beside the first products of the next one: a quarter beside each.
    """
    _x_desc, _w_desc, y_desc, bias_ptr, _xs, _ws, staged, _ready, free, sizes = everything
    DTYPE: constexpr = y_desc.dtype
    BENT: constexpr = bias_ptr is not None
    WIDTH: constexpr = 2 * OUTPUTS if BENT else OUTPUTS
    FIRST: constexpr = QUARTERS if BENT else 0
    MMA: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * OUTPUTS, 16])
    slot = 0
    phase = 0
    before = slot
    acc = warpgroup_mma_init(gl.zeros([ROWS, 2 * OUTPUTS], gl.float32, MMA))
    if BENT:
        parts = quarters(gl.zeros([ROWS, 2 * OUTPUTS], DTYPE, MMA))
        last_row = sizes.rows
        last_output = sizes.outputs
    for tile in range(gl.program_id(0), _tiles(sizes, WIDTH), gl.num_programs(0)):
        row, output = _corner(tile, sizes, WIDTH)
        for part in gl.static_range(FIRST):
            acc = _started(WHICH, slot, phase, acc, part > 0, everything)
            if last_row < sizes.rows:
                piece = staged.index(2 * WHICH + part % 2)
                store_bent(parts[part], y_desc, piece, last_row, last_output + part * COLS)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            if part > 0:
                mbarrier.arrive(free.index(before), count=1)
            before = slot
            slot, phase = _next(slot, phase)
        for column in range(FIRST * COLS, sizes.columns, COLS):
            later = True if BENT else column > 0
            acc = _started(WHICH, slot, phase, acc, later, everything)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(free.index(before), count=1, pred=later)
            before = slot
            slot, phase = _next(slot, phase)
        if BENT:
            bias = gl.load(bias_ptr + output + gl.arange(0, 2 * OUTPUTS, layout=gl.SliceLayout(0, MMA)))
        sums = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(before), count=1)
        acc = warpgroup_mma_init(sums)
        if BENT:
            parts = quarters((sums + bias.to(gl.float32)[None, :]).to(DTYPE))
            last_row = row + WHICH * ROWS
            last_output = output
        else:
            store_gated(sums, y_desc, staged.index(WHICH), row + WHICH * ROWS, output)
    if BENT and last_row < sizes.rows:
        for part in gl.static_range(QUARTERS):
            piece = staged.index(2 * WHICH + part % 2)
            store_bent(parts[part], y_desc, piece, last_row, last_output + part * COLS)
    tma.store_wait(0)


@gluon.jit
def _first(everything: tensor) -> None:
    _multiply(0, everything)


@gluon.jit
def _second(everything: tensor) -> None:
    _multiply(1, everything)


@gluon.jit(do_not_specialize=["rows"])
def prompt_gate_up_kernel(
    x_desc: tensor,
    w_desc: tensor,
    y_desc: tensor,
    bias_ptr: tensor,
    rows: tensor,
    outputs: tensor,
    columns: tensor,
) -> None:
    """Tiles of 128 rows and 128 gated outputs, or 256 plain ones, as far apart as there are programs."""
    xs = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, COLS], x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, OUTPUTS, COLS], w_desc.layout)
    WIDTH: constexpr = OUTPUTS if bias_ptr is None else COLS
    staged = gl.allocate_shared_memory(y_desc.dtype, [2 * OUTPUTS // WIDTH, ROWS, WIDTH], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    sizes = Sizes(rows, outputs, columns)
    everything = (x_desc, w_desc, y_desc, bias_ptr, xs, ws, staged, ready, free, sizes)
    gl.warp_specialize(
        [(_first, (everything,)), (_second, (everything,)), (_copy, (everything,))],
        [4, 1],
        [240, 24],
    )
