"""The gate and up product of a prompt's rows on Hopper, in 16 bits, with the activation in its epilogue.

One warp of a program copies rows and weights to shared memory (TMA). Two groups of four warps have 64 rows of
a tile each, and beside one another the sums of 128 outputs of the gate and the same ones of up: what is
written is half as wide as the product, which is not read again.

    if takes_gate_up(x, weight): y = prompt_gate_up(x, weight)
"""

from __future__ import annotations

# mypy: disable-error-code="misc"
# (Names are bound again with other layouts in jitted code.)
import functools
from typing import Any, NamedTuple

import torch
import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr, tensor

from ingot.kernels.activation.gated_mlp import silu_mul_reference
from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_rows, multiprocessors, runs_on_gpu
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT

ROWS = gl.constexpr(64)  # of a group of four warps
OUTPUTS = gl.constexpr(128)  # of a tile: as many sums of the gate, and of up
COLS = gl.constexpr(64)  # of a step
STAGES = gl.constexpr(4)  # steps in shared memory
SPAN = gl.constexpr(16)  # tiles of rows that are done for one tile of outputs before the next
LEAST_ROWS, LEAST_FULL = (
    1024,
    0.95,
)  # with fewer, or emptier last tiles, the library was faster: `takes_gate_up`


class Sizes(NamedTuple):
    """Rows, the activation's width and the columns that are summed."""

    rows: Any
    outputs: Any
    columns: Any


@gluon.jit
def _tiles(sizes: Sizes) -> tensor:
    """How many tiles there are."""
    return gl.cdiv(sizes.rows, 2 * ROWS) * (sizes.outputs // OUTPUTS)


@gluon.jit
def _corner(tile: tensor, sizes: Sizes) -> tensor:
    """A tile's first row and output."""
    per = sizes.outputs // OUTPUTS * SPAN
    first = tile // per * SPAN
    height = gl.minimum(gl.cdiv(sizes.rows, 2 * ROWS) - first, SPAN)
    return (first + tile % per % height) * (2 * ROWS), tile % per // height * OUTPUTS


@gluon.jit
def _copy(everything: tensor) -> None:
    """Copy the operands of every step, as soon as their place in shared memory is free."""
    x_desc, w_desc, _y_desc, xs, ws, _staged, ready, free, sizes = everything
    BYTES: constexpr = (2 * ROWS + 2 * OUTPUTS) * COLS * 2
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), _tiles(sizes), gl.num_programs(0)):
        row, output = _corner(tile, sizes)
        for column in range(0, sizes.columns, COLS):
            mbarrier.wait(free.index(slot), phase)
            bar = ready.index(slot)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(x_desc, [row, column], bar, xs.index(2 * slot))
            tma.async_copy_global_to_shared(w_desc, [output, column], bar, ws.index(2 * slot))
            up = sizes.outputs + output
            tma.async_copy_global_to_shared(w_desc, [up, column], bar, ws.index(2 * slot + 1))
            tma.async_copy_global_to_shared(x_desc, [row + ROWS, column], bar, xs.index(2 * slot + 1))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _multiply(WHICH: constexpr, everything: tensor) -> None:
    """One group's rows, tile by tile. A step's product starts before the one before has ended."""
    _x_desc, w_desc, y_desc, xs, ws, staged, ready, free, sizes = everything
    DTYPE: constexpr = y_desc.dtype
    MMA: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * OUTPUTS, 16])
    both = ws._reinterpret(w_desc.dtype, [STAGES, 2 * OUTPUTS, COLS], w_desc.layout)
    slot = 0
    phase = 0
    before = slot
    acc = warpgroup_mma_init(gl.zeros([ROWS, 2 * OUTPUTS], gl.float32, MMA))
    for tile in range(gl.program_id(0), _tiles(sizes), gl.num_programs(0)):
        row, output = _corner(tile, sizes)
        for column in range(0, sizes.columns, COLS):
            mbarrier.wait(ready.index(slot), phase)
            right = both.index(slot).permute((1, 0))
            acc = warpgroup_mma(xs.index(2 * slot + WHICH), right, acc, use_acc=column > 0, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(free.index(before), count=1, pred=column > 0)
            before = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        sums = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(before), count=1)
        acc = warpgroup_mma_init(sums)
        gate, up = gl.split(sums.reshape([ROWS, 2, OUTPUTS]).permute((0, 2, 1)))
        gate = gate.to(DTYPE).to(gl.float32)
        gate = (gate / (1.0 + gl.exp(-gate))).to(DTYPE).to(gl.float32)
        y = (gate * up.to(DTYPE).to(gl.float32)).to(DTYPE)
        piece = staged.index(WHICH)
        tma.store_wait(0)
        piece.store(y)
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [row + WHICH * ROWS, output], piece)
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
    rows: tensor,
    outputs: tensor,
    columns: tensor,
) -> None:
    """Tiles of 128 rows and 128 outputs, as far apart as there are programs."""
    xs = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, COLS], x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, OUTPUTS, COLS], w_desc.layout)
    staged = gl.allocate_shared_memory(y_desc.dtype, [2, ROWS, OUTPUTS], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    everything = (x_desc, w_desc, y_desc, xs, ws, staged, ready, free, Sizes(rows, outputs, columns))
    gl.warp_specialize(
        [(_first, (everything,)), (_second, (everything,)), (_copy, (everything,))],
        [4, 1],
        [240, 24],
    )


_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@functools.cache
def _hopper(device: torch.device) -> bool:
    """Whether a GPU has the instructions: compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def takes_gate_up(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel is the faster way for these rows and this weight (benchmarks/prompt_gate_up.py): on
    Hopper, in bf16, of many rows and whole tiles of outputs, which descriptors can read and which keep most
    programs busy to the end.
    """
    if len(x) < LEAST_ROWS or weight.dtype != torch.bfloat16 or not _hopper(weight.device):
        return False
    tiles, programs = triton.cdiv(len(x), 128) * (weight.shape[0] // 256), multiprocessors(weight.device)
    full = tiles >= LEAST_FULL * programs * triton.cdiv(tiles, programs)
    whole = weight.shape[0] % (2 * OUTPUTS.value) == 0
    return (
        full
        and whole
        and all(
            start % DESCRIPTOR_ALIGNMENT == 0
            for side in (x, weight)
            for start in (side.data_ptr(), side.stride(0) * side.element_size())
        )
    )


def prompt_gate_up(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y = cast(silu(cast(x G^T))) * cast(x U^T): the product and ``silu_mul`` of it, rounded alike.

    Args:
        x: [T, K] fp16 or bf16, any T.
        weight: [2 I, K], dtype of x: the gate G, then U; I is a multiple of 128.

    Returns:
        [T, I], dtype of x.
    """
    expect_rows("x", x)
    expect("weight", weight, (None, x.shape[1]), like=x)
    inner = weight.shape[0] // 2
    if weight.shape[0] % (2 * OUTPUTS.value):
        raise KernelArgumentError(
            "weight has no whole tiles", seen=weight.shape[0], allowed="multiples of 256"
        )
    if not runs_on_gpu(x):
        return silu_mul_reference(x @ weight.t())
    y = x.new_empty((len(x), inner))
    if y.numel():
        tiles = triton.cdiv(len(x), 2 * ROWS.value) * (inner // OUTPUTS.value)
        prompt_gate_up_kernel[(min(tiles, multiprocessors(x.device)),)](
            _descriptor(x, ROWS.value, COLS.value),
            _descriptor(weight, OUTPUTS.value, COLS.value),
            _descriptor(y, ROWS.value, OUTPUTS.value),
            len(x),
            inner,
            x.shape[1],
            num_warps=4,
        )
    return y


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], _LAYOUT)
