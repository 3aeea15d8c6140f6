"""The gate and up product of a prompt's rows, or a plain MLP's up product, on Hopper, in 16 bits, with the
activation in its epilogue.

One warp of a program copies rows and weights to shared memory (TMA). Two groups of four warps have 64 rows of
a tile each, and beside one another the sums of 128 outputs of the gate and the same ones of up: what is
written is half as wide as the product, which is not read again. Of a plain MLP they have the sums of 256
outputs with the bias, and compute GELU of them beside the next tile's products.

    if takes_gate_up(x, weight): y = prompt_gate_up(x, weight)
    if takes_up(x, weight): y = prompt_up(x, weight, bias)
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
from ingot.kernels.activation.plain_activation import plain_activation
from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_rows, multiprocessors, runs_on_gpu
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT

ROWS = gl.constexpr(64)  # of a group of four warps
OUTPUTS = gl.constexpr(128)  # of a tile: as many sums of the gate, and of up
COLS = gl.constexpr(64)  # of a step
QUARTERS = gl.constexpr(4)  # of 256 outputs: as wide as a step
STAGES = gl.constexpr(4)  # steps in shared memory
SPAN = gl.constexpr(16)  # tiles of rows that are done for one tile of outputs before the next
# Q of `_gelu`, times -log2(e)
_GELU_0 = gl.constexpr(-2.3022072315216064)
_GELU_1 = gl.constexpr(-0.10483857989311218)
_GELU_2 = gl.constexpr(9.559298632666469e-05)
_GELU_3 = gl.constexpr(0.00015938939759507775)
_GELU_4 = gl.constexpr(-1.145242822531145e-05)
_GELU_5 = gl.constexpr(3.85044870654383e-07)
_GELU_6 = gl.constexpr(-5.209906284164845e-09)
# With fewer rows, or emptier last tiles, the library was faster: `takes_gate_up`, `takes_up`.
LEAST_ROWS, LEAST_FULL = 1024, 0.95
LEAST_ROWS_UP, LEAST_FULL_UP = 2048, 0.88


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
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _multiply(WHICH: constexpr, everything: tensor) -> None:
    """One group's rows, tile by tile. A step's product starts before the one before has ended."""
    _x_desc, w_desc, y_desc, _bias_ptr, xs, ws, staged, ready, free, sizes = everything
    DTYPE: constexpr = y_desc.dtype
    MMA: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * OUTPUTS, 16])
    both = ws._reinterpret(w_desc.dtype, [STAGES, 2 * OUTPUTS, COLS], w_desc.layout)
    slot = 0
    phase = 0
    before = slot
    acc = warpgroup_mma_init(gl.zeros([ROWS, 2 * OUTPUTS], gl.float32, MMA))
    for tile in range(gl.program_id(0), _tiles(sizes, OUTPUTS), gl.num_programs(0)):
        row, output = _corner(tile, sizes, OUTPUTS)
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


@gluon.jit
def _quarters(x: tensor) -> tensor:
    """Columns [ROWS, 256] in four parts, in order."""
    left, right = gl.split(x.reshape([ROWS, 2, OUTPUTS]).permute((0, 2, 1)))
    first, second = gl.split(left.reshape([ROWS, 2, COLS]).permute((0, 2, 1)))
    third, fourth = gl.split(right.reshape([ROWS, 2, COLS]).permute((0, 2, 1)))
    return first, second, third, fourth


@gluon.jit
def _gelu(x: tensor) -> tensor:
    """x · Φ(x) within 7e-8 plus roundings: Φ(x) = 1 / (1 + exp(-x · Q(x²))), which takes half of erf's time.
    Q falls on beyond the values that it was fitted to: Φ becomes 0 or 1.
    """
    t = x * x
    q = _GELU_6
    q = q * t + _GELU_5
    q = q * t + _GELU_4
    q = q * t + _GELU_3
    q = q * t + _GELU_2
    q = q * t + _GELU_1
    q = q * t + _GELU_0
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(x * q)], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _store_bent(x: tensor, y_desc: tensor, piece: tensor, row: tensor, output: tensor) -> None:
    """Write GELU of a quarter, once the last but one is out of its place in shared memory."""
    y = _gelu(x.to(gl.float32)).to(y_desc.dtype)
    tma.store_wait(1)
    piece.store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row, output], piece)


@gluon.jit
def _multiply_bent(WHICH: constexpr, everything: tensor) -> None:
    """One group's rows, tile by tile. GELU of a tile's sums is computed beside the first products of the next
    one: a quarter beside each.
    """
    _x_desc, w_desc, y_desc, bias_ptr, xs, ws, staged, ready, free, sizes = everything
    DTYPE: constexpr = y_desc.dtype
    MMA: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * OUTPUTS, 16])
    both = ws._reinterpret(w_desc.dtype, [STAGES, 2 * OUTPUTS, COLS], w_desc.layout)
    slot = 0
    phase = 0
    before = slot
    acc = warpgroup_mma_init(gl.zeros([ROWS, 2 * OUTPUTS], gl.float32, MMA))
    parts = _quarters(gl.zeros([ROWS, 2 * OUTPUTS], DTYPE, MMA))
    last_row = sizes.rows
    last_output = sizes.outputs
    for tile in range(gl.program_id(0), _tiles(sizes, 2 * OUTPUTS), gl.num_programs(0)):
        row, output = _corner(tile, sizes, 2 * OUTPUTS)
        for part in gl.static_range(QUARTERS):
            mbarrier.wait(ready.index(slot), phase)
            right = both.index(slot).permute((1, 0))
            acc = warpgroup_mma(xs.index(2 * slot + WHICH), right, acc, use_acc=part > 0, is_async=True)
            if last_row < sizes.rows:
                _store_bent(
                    parts[part],
                    y_desc,
                    staged.index(2 * WHICH + part % 2),
                    last_row,
                    last_output + part * COLS,
                )
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            if part > 0:
                mbarrier.arrive(free.index(before), count=1)
            before = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        for _column in range(QUARTERS * COLS, sizes.columns, COLS):
            mbarrier.wait(ready.index(slot), phase)
            right = both.index(slot).permute((1, 0))
            acc = warpgroup_mma(xs.index(2 * slot + WHICH), right, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(free.index(before), count=1)
            before = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        bias = gl.load(bias_ptr + output + gl.arange(0, 2 * OUTPUTS, layout=gl.SliceLayout(0, MMA)))
        sums = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(before), count=1)
        acc = warpgroup_mma_init(sums)
        parts = _quarters((sums + bias.to(gl.float32)[None, :]).to(DTYPE))
        last_row = row + WHICH * ROWS
        last_output = output
    if last_row < sizes.rows:
        for part in gl.static_range(QUARTERS):
            _store_bent(
                parts[part], y_desc, staged.index(2 * WHICH + part % 2), last_row, last_output + part * COLS
            )
    tma.store_wait(0)


@gluon.jit
def _first_bent(everything: tensor) -> None:
    _multiply_bent(0, everything)


@gluon.jit
def _second_bent(everything: tensor) -> None:
    _multiply_bent(1, everything)


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
    if bias_ptr is None:
        gl.warp_specialize(
            [(_first, (everything,)), (_second, (everything,)), (_copy, (everything,))],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [(_first_bent, (everything,)), (_second_bent, (everything,)), (_copy, (everything,))],
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
    return _busy_share(x, weight) >= LEAST_FULL and _readable(x, weight)


def takes_up(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """The same of a product with GELU, in fp16 or bf16."""
    if len(x) < LEAST_ROWS_UP or weight.dtype.itemsize != 2 or not _hopper(weight.device):
        return False
    return _busy_share(x, weight) >= LEAST_FULL_UP and _readable(x, weight)


def _busy_share(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Of the multiprocessors' time while the kernel runs: the last tiles keep few of them busy."""
    tiles, programs = triton.cdiv(len(x), 128) * (weight.shape[0] // 256), multiprocessors(weight.device)
    return tiles / (programs * max(triton.cdiv(tiles, programs), 1))


def _readable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there are whole tiles of outputs, and descriptors can read both operands."""
    return weight.shape[0] % (2 * OUTPUTS.value) == 0 and all(
        start % DESCRIPTOR_ALIGNMENT == 0
        for side in (x, weight)
        for start in (side.data_ptr(), side.stride(0) * side.element_size())
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
            None,
            len(x),
            inner,
            x.shape[1],
            num_warps=4,
        )
    return y


def prompt_up(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """y = cast(gelu(cast(x W^T + b))): the product and exact GELU of it, rounded alike.

    Args:
        x: [T, K] fp16 or bf16, any T.
        weight: [I, K], dtype of x; I is a multiple of 256.
        bias: [I], dtype of x.

    Returns:
        [T, I], dtype of x.
    """
    expect_rows("x", x)
    expect("weight", weight, (None, x.shape[1]), like=x)
    inner = len(weight)
    expect("bias", bias, (inner,), like=x)
    if inner % (2 * OUTPUTS.value):
        raise KernelArgumentError("weight has no whole tiles", seen=inner, allowed="multiples of 256")
    if not runs_on_gpu(x):
        return plain_activation(torch.nn.functional.linear(x, weight, bias), "gelu")
    y = x.new_empty((len(x), inner))
    if y.numel():
        tiles = triton.cdiv(len(x), 2 * ROWS.value) * (inner // (2 * OUTPUTS.value))
        prompt_gate_up_kernel[(min(tiles, multiprocessors(x.device)),)](
            _descriptor(x, ROWS.value, COLS.value),
            _descriptor(weight, OUTPUTS.value, COLS.value),
            _descriptor(y, ROWS.value, COLS.value),
            bias,
            len(x),
            inner,
            x.shape[1],
            num_warps=4,
        )
    return y


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], _LAYOUT)
