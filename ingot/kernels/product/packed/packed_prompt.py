"""The product of a prompt's rows with a weight of 8 or 4 bits on Hopper, unpacked beside tensor cores.

y^T = W · x^T: one warp of a program copies rows of x to shared memory, and two groups of four warps multiply
64 outputs each. A group loads its words straight into registers and unpacks the next step's operand
(prompt_words.py) while the product of this step runs. No wide copy of the weight is written.

    if takes_prompt(x, weight): y = packed_prompt(x, weight, bias)
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
# (Tuples grow in jitted loops.)
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

from ingot.kernels.kernel_checks import expect, multiprocessors, runs_on_gpu
from ingot.kernels.product.packed.packed_matmul import DTYPES, expect_packed, packed_matmul_reference
from ingot.kernels.product.packed.prompt_words import (
    arranged,
    less_of,
    operand,
    own_rows,
    pair_layout,
    sums_layout,
    twice,
    wide,
)
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT
from ingot.kernels.weight.stored_weight import StoredWeight

COLS = gl.constexpr(64)  # columns of a step: one part of the words
UNIT = gl.constexpr(512)  # 32-bit words of 16 rows and one chunk


class PromptLoop(NamedTuple):
    """The kernel's constants.

    Attributes:
        BITS, GROUP, ZEROS: of the weight.
        BIAS: whether one is added.
        BLOCK_T, BLOCK_N: rows and outputs of a tile.
        STAGES: steps of 64 columns in shared memory.
        SPAN: tiles of rows that are done for one tile of outputs before the next.
    """

    BITS: int
    GROUP: int
    ZEROS: bool
    BIAS: bool
    BLOCK_T: int
    BLOCK_N: int
    STAGES: int
    SPAN: int


class Places(NamedTuple):
    """What is read, strides and sizes; ``zero``: 0, which the compiler does not know."""

    words: Any
    block_stride: Any
    scales: Any
    zeros: Any
    scale_stride: Any
    bias: Any
    tokens: Any
    outputs: Any
    columns: Any
    units: Any
    zero: Any


@gluon.jit
def _tiles(places: tensor, LOOP: constexpr) -> tensor:
    """How many tiles there are."""
    return gl.cdiv(places.tokens, LOOP.BLOCK_T) * (places.outputs // LOOP.BLOCK_N)


@gluon.jit
def _corner(tile: tensor, places: tensor, LOOP: constexpr) -> tensor:
    """A tile's first row and output; the last tile's past the end."""
    tile = gl.minimum(tile, _tiles(places, LOOP) - 1)
    per = places.outputs // LOOP.BLOCK_N * LOOP.SPAN
    first = tile // per * LOOP.SPAN
    size = gl.minimum(gl.cdiv(places.tokens, LOOP.BLOCK_T) - first, LOOP.SPAN)
    return (first + tile % per % size) * LOOP.BLOCK_T, tile % per // size * LOOP.BLOCK_N


@gluon.jit
def _copy(everything: tensor, LOOP: constexpr) -> None:
    """Copy the rows of every step, as soon as their place in shared memory is free."""
    x_desc, _y_desc, xs, _staged, ready, free, places = everything
    PARTS: constexpr = 16 // LOOP.BITS
    BYTES: constexpr = LOOP.BLOCK_T * COLS * 2
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), _tiles(places, LOOP), gl.num_programs(0)):
        first_token, _first_output = _corner(tile, places, LOOP)
        for step in range(places.units * PARTS):
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(ready.index(slot), BYTES)
            tma.async_copy_global_to_shared(
                x_desc, [first_token, step * COLS], ready.index(slot), xs.index(slot)
            )
            slot += 1
            if slot == LOOP.STAGES:
                slot = 0
                phase ^= 1


@triton.constexpr_function
def _groups(bits: int, group: int) -> int:
    """Groups of columns in a unit."""
    return max(COLS.value * 16 // bits // group, 1) if group else 1


@gluon.jit
def _beside(
    unit: tensor, rows: tensor, places: tensor, ZEROS: constexpr, LOOP: constexpr, DTYPE: constexpr
) -> tensor:
    """Scales of a unit's groups, or what takes the zeros away, in both halves of 32 bits: a tuple."""
    WIDTH: constexpr = COLS * 16 // LOOP.BITS
    GROUPS: constexpr = _groups(LOOP.BITS, LOOP.GROUP)
    found = ()
    for own in gl.static_range(GROUPS):
        group = (unit * WIDTH + own * (WIDTH // GROUPS)) // LOOP.GROUP
        place = gl.minimum(group, (places.columns - 1) // LOOP.GROUP) * places.scale_stride + rows
        if ZEROS:
            found = found + (less_of(gl.load(places.zeros + place), LOOP.BITS, DTYPE),)  # noqa: RUF005
        else:
            scale = gl.load(places.scales + place).to(gl.int16, bitcast=True)
            found = found + (twice(scale),)  # noqa: RUF005
    return found


@gluon.jit
def _unit(
    unit: tensor, place: tensor, rows: tensor, places: tensor, LOOP: constexpr, DTYPE: constexpr
) -> tensor:
    """A unit's words, and by groups what is added to its values, and their scales."""
    loaded = gl.load(places.words + place)
    middle = gl.full(rows.shape, 1 << (LOOP.BITS - 1), gl.int32, rows.type.layout)
    if LOOP.ZEROS and LOOP.GROUP == 0:
        middle = gl.load(places.zeros + rows)
    less = ()
    if LOOP.ZEROS and LOOP.GROUP > 0:
        less = _beside(unit, rows, places, True, LOOP, DTYPE)
    else:
        for _own in gl.static_range(_groups(LOOP.BITS, LOOP.GROUP)):
            less = less + (less_of(middle, LOOP.BITS, DTYPE),)  # noqa: RUF005
    scales = less
    if LOOP.GROUP > 0:
        scales = _beside(unit, rows, places, False, LOOP, DTYPE)
    return loaded, less, scales


@gluon.jit
def _multiply(WHICH: constexpr, everything: tensor, LOOP: constexpr) -> None:
    """One group's half of the outputs, tile by tile: the first words of a tile are loaded and unpacked in the
    last steps of the one before.
    """
    _x_desc, y_desc, xs, staged, ready, free, places = everything
    DTYPE: constexpr = y_desc.dtype
    BLOCK_T: constexpr = LOOP.BLOCK_T
    BLOCK_N: constexpr = LOOP.BLOCK_N // 2
    PARTS: constexpr = 16 // LOOP.BITS
    GROUPS: constexpr = _groups(LOOP.BITS, LOOP.GROUP)
    MMA: constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_T, 16]
    )
    LEFT: constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    LOADS: constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    index = gl.arange(0, 8 * BLOCK_N, gl.SliceLayout(1, LOADS))
    four = gl.arange(0, 4, gl.SliceLayout(0, LOADS))
    lanes = index[:, None] + four[None, :] * 0
    block = index // 32 % (BLOCK_N // 16) * places.block_stride
    place = (index // (2 * BLOCK_N) * 128 + index % 32 * 4 + block)[:, None] + four[None, :]
    rows = own_rows(BLOCK_N, gl.SliceLayout(1, pair_layout(BLOCK_N, COLS)))
    sum_rows = own_rows(BLOCK_N, gl.SliceLayout(1, MMA))
    slot = 0
    phase = 0
    before = slot
    first_token, first_output = _corner(gl.program_id(0), places, LOOP)
    first_output += WHICH * BLOCK_N
    here = (first_output // 16).to(gl.int64) * places.block_stride
    loaded, less, scales = _unit(0, here + place, first_output + rows, places, LOOP, DTYPE)
    next_less, next_scales = less, scales
    words = arranged(loaded, lanes, BLOCK_N, COLS)
    left = operand(wide(words, less[0], scales[0], 0, LOOP, DTYPE), DTYPE, LEFT)
    acc = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_T], gl.float32, MMA))
    for tile in range(gl.program_id(0), _tiles(places, LOOP), gl.num_programs(0)):
        next_token, next_output = _corner(tile + gl.num_programs(0), places, LOOP)
        next_output += WHICH * BLOCK_N
        there = (next_output // 16).to(gl.int64) * places.block_stride
        if LOOP.GROUP == 0:
            row_scales = gl.load(places.scales + first_output + sum_rows)
        if LOOP.BIAS:
            bias = gl.load(places.bias + first_output + sum_rows)
        for unit in range(places.units):
            ends = unit + 1 == places.units
            for part in gl.static_range(PARTS):
                mbarrier.wait(ready.index(slot), phase)
                acc = warpgroup_mma(
                    left, xs.index(slot).permute((1, 0)), acc, use_acc=unit + part > 0, is_async=True
                )
                acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
                if part > 0:
                    mbarrier.arrive(free.index(before), count=1)
                if part + 1 == PARTS:
                    words = arranged(loaded, lanes, BLOCK_N, COLS)
                    less, scales = next_less, next_scales
                    pairs = wide(words, less[0], scales[0], 0, LOOP, DTYPE)
                    # Registers of the loop's next product are written while none runs: otherwise the compiler
                    # waits for every product where it is issued.
                    acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(acc,)))
                    mbarrier.arrive(free.index(slot), count=1)
                    pairs = pairs ^ places.zero
                else:
                    own_less, own_scales = (
                        less[(part + 1) * GROUPS // PARTS],
                        scales[(part + 1) * GROUPS // PARTS],
                    )
                    pairs = wide(words, own_less, own_scales, part + 1, LOOP, DTYPE)
                left = operand(pairs, DTYPE, LEFT)
                if part == 0:  # the next unit is loaded; after the last the next tile's first
                    later = gl.where(ends, 0, unit + 1)
                    at = gl.where(ends, there, here + later * UNIT) + place
                    at_rows = gl.where(ends, next_output, first_output) + rows
                    loaded, next_less, next_scales = _unit(later, at, at_rows, places, LOOP, DTYPE)
                before = slot
                slot += 1
                if slot == LOOP.STAGES:
                    slot = 0
                    phase ^= 1
        sums = warpgroup_mma_wait(0, deps=(acc,))
        acc = warpgroup_mma_init(sums)
        if LOOP.GROUP == 0:
            sums *= row_scales.to(gl.float32)[:, None]
        if LOOP.BIAS:
            sums += bias.to(gl.float32)[:, None]
        _store(sums.to(DTYPE), first_token, first_output, y_desc, staged.index(WHICH))
        first_token, first_output, here = next_token, next_output, there
    tma.store_wait(0)


@gluon.jit
def _store(y: tensor, first_token: tensor, first_output: tensor, y_desc: tensor, stage: tensor) -> None:
    """Sums, which lie by outputs in an operand's order, as rows of y through shared memory."""
    BLOCK_N: constexpr = y.shape[0]
    BLOCK_T: constexpr = y.shape[1]
    y = gl.permute(gl.reshape(y, (BLOCK_N // 16, 2, 8, BLOCK_T)), (0, 2, 1, 3))
    y = gl.convert_layout(gl.reshape(y, (BLOCK_N, BLOCK_T)), sums_layout(BLOCK_N, BLOCK_T))
    tma.store_wait(0)
    stage.store(gl.permute(y, (1, 0)))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [first_token, first_output], stage)


@gluon.jit
def _first(everything: tensor, LOOP: constexpr) -> None:
    _multiply(0, everything, LOOP)


@gluon.jit
def _second(everything: tensor, LOOP: constexpr) -> None:
    _multiply(1, everything, LOOP)


@gluon.jit(do_not_specialize=["tokens", "units", "zero"])
def packed_prompt_kernel(
    x_desc: tensor,
    y_desc: tensor,
    words: tensor,
    block_stride: tensor,
    scales: tensor,
    zeros: tensor,
    scale_stride: tensor,
    bias: tensor,
    tokens: tensor,
    outputs: tensor,
    columns: tensor,
    units: tensor,
    zero: tensor,
    LOOP: constexpr,
) -> None:
    """Tiles of BLOCK_T rows and BLOCK_N outputs, as far apart as there are programs."""
    STAGES: constexpr = LOOP.STAGES
    places = Places(
        words, block_stride, scales, zeros, scale_stride, bias, tokens, outputs, columns, units, zero
    )
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, LOOP.BLOCK_T, COLS], x_desc.layout)
    staged = gl.allocate_shared_memory(y_desc.dtype, [2, LOOP.BLOCK_T, LOOP.BLOCK_N // 2], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    everything = (x_desc, y_desc, xs, staged, ready, free, places)
    gl.warp_specialize(
        [(_first, (everything, LOOP)), (_second, (everything, LOOP)), (_copy, (everything, LOOP))],
        [4, 1],
        [240, 24],
    )


BLOCK_N = 128
# Rows of a tile: steps in shared memory, and the time of a tile in % of that of the first.
BLOCK_T = {256: (5, 100), 128: (10, 60)}
SPAN = 16
_BUILT: set[tuple[Any, ...]] = set()
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@functools.lru_cache(maxsize=4096)
def prompt_rows(tokens: int, outputs: int, programs: int) -> int:
    """Rows of a tile: fewer where that ends earlier, because larger tiles leave programs without work."""

    def time(rows: int) -> int:
        return -(-(-(-tokens // rows) * (outputs // BLOCK_N)) // programs) * BLOCK_T[rows][1]

    return min(BLOCK_T, key=time)


@functools.cache
def _hopper(device: torch.device) -> bool:
    """Whether a GPU has the instructions: compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def takes_prompt(x: torch.Tensor, weight: StoredWeight) -> bool:
    """Whether this kernel can multiply these rows and this weight: on Hopper, in fp16 or bf16, of whole tiles
    of outputs, without groups or by 128 columns and more, and of rows that start at multiples of 16 bytes.
    """
    starts = (x.data_ptr(), x.stride(0) * x.element_size())
    read = x.dtype in DTYPES and all(start % DESCRIPTOR_ALIGNMENT == 0 for start in starts)
    return read and unpacks_prompts(weight) and weight.scales is not None and weight.scales.dtype == x.dtype


def unpacks_prompts(weight: StoredWeight) -> bool:
    """Whether the kernel takes such a weight, on the GPU where it lies."""
    whole = weight.out_features % BLOCK_N == 0
    return whole and weight.bits < 16 and weight.group not in (32, 64) and _hopper(weight.values.device)


def packed_prompt(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + bias, W of 8 or 4 bits: arguments and rounding are as of :func:`packed_matmul`.

    Args:
        x: [M, K] fp16 or bf16, any M, columns in natural order.
        weight: [N, K], without an order.
        bias: [N], dtype of x, or None.

    Returns:
        [M, N], dtype of x.
    """
    expect_packed(x, weight)
    if bias is not None:
        expect("bias", bias, (weight.out_features,), like=x)
    if not runs_on_gpu(x):
        y = packed_matmul_reference(x, weight)
        return (y if bias is None else y + bias.float()).to(x.dtype)
    y = x.new_empty((x.shape[0], weight.out_features))
    if y.numel():
        _launch(x, weight, bias, y)
    return y


def _launch(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    programs = multiprocessors(x.device)
    block = prompt_rows(len(x), weight.out_features, programs)
    kind = (weight.bits, weight.group, weight.zeros is not None, bias is not None)
    if (x.dtype, x.device, kind) not in _BUILT:  # a server should not compile beside its first short prompt
        _BUILT.add((x.dtype, x.device, kind))
        for other in BLOCK_T.keys() - {block}:
            arguments, loop = _arguments(x, weight, bias, y, other, kind)
            packed_prompt_kernel.warmup(*arguments, LOOP=loop, num_warps=4, grid=(1,))
    arguments, loop = _arguments(x, weight, bias, y, block, kind)
    tiles = triton.cdiv(len(x), block) * (weight.out_features // BLOCK_N)
    packed_prompt_kernel[(min(tiles, programs),)](*arguments, LOOP=loop, num_warps=4)


def _arguments(
    x: torch.Tensor,
    weight: StoredWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    block: int,
    kind: tuple[int, int, bool, bool],
) -> tuple[tuple[Any, ...], PromptLoop]:
    """The kernel's arguments and constants for tiles of ``block`` rows."""
    words, scales = weight.values, weight.scales
    assert scales is not None
    arguments = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [block, COLS.value], _LAYOUT),
        TensorDescriptor(y, list(y.shape), list(y.stride()), [block, BLOCK_N // 2], _LAYOUT),
        words.view(torch.int32),
        words.stride(0) * 8,  # 16 rows, two words each
        scales,
        weight.zeros,
        scales.stride(0) if weight.group else 0,
        bias,
        len(x),
        weight.out_features,
        weight.in_features,
        words.shape[1] // COLS.value,
        0,
    )
    return arguments, PromptLoop(*kind, block, BLOCK_N, BLOCK_T[block][0], SPAN)
