"""The kernel of packed_prompt.py: one warp of a program copies rows of x to shared memory, two groups of four
warps multiply half of a tile's outputs each, y^T = W · x^T.

A group loads its words straight into registers and unpacks the next step's operand (prompt_words.py) while
the product of this step runs. No wide copy of the weight is written.

    packed_prompt_kernel[(programs,)](*arguments, LOOP=PromptLoop(…), num_warps=4)
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
# (Tuples grow in jitted loops.)
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
from triton.language import constexpr, tensor

from ingot.kernels.product.packed.prompt_tiles import (
    CHUNK,
    COLS,
    Places,
    copy_rows,
    tile_corner,
    tile_count,
)
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


@triton.constexpr_function
def _groups(bits: int, group: int) -> int:
    """Groups of columns in a chunk."""
    return max(COLS.value * 16 // bits // group, 1) if group else 1


@gluon.jit
def _beside(
    chunk: tensor, rows: tensor, places: tensor, ZEROS: constexpr, LOOP: constexpr, DTYPE: constexpr
) -> tensor:
    """Scales of a chunk's groups, or what takes the zeros away, in both halves of 32 bits: a tuple."""
    WIDTH: constexpr = COLS * 16 // LOOP.BITS
    GROUPS: constexpr = _groups(LOOP.BITS, LOOP.GROUP)
    found = ()
    for own in gl.static_range(GROUPS):
        group = (chunk * WIDTH + own * (WIDTH // GROUPS)) // LOOP.GROUP
        place = gl.minimum(group, (places.columns - 1) // LOOP.GROUP) * places.scale_stride + rows
        if ZEROS:
            found = found + (less_of(gl.load(places.zeros + place), LOOP.BITS, DTYPE),)  # noqa: RUF005
        else:
            scale = gl.load(places.scales + place).to(gl.int16, bitcast=True)
            found = found + (twice(scale),)  # noqa: RUF005
    return found


@gluon.jit
def _factors(chunk: tensor, rows: tensor, places: tensor, LOOP: constexpr, DTYPE: constexpr) -> tensor:
    """By a chunk's groups what is added to its values, and their scales."""
    middle = gl.full(rows.shape, 1 << (LOOP.BITS - 1), gl.int32, rows.type.layout)
    if LOOP.ZEROS and LOOP.GROUP == 0:
        middle = gl.load(places.zeros + rows)
    less = ()
    if LOOP.ZEROS and LOOP.GROUP > 0:
        less = _beside(chunk, rows, places, True, LOOP, DTYPE)
    else:
        for _own in gl.static_range(_groups(LOOP.BITS, LOOP.GROUP)):
            less = less + (less_of(middle, LOOP.BITS, DTYPE),)  # noqa: RUF005
    scales = less
    if LOOP.GROUP > 0:
        scales = _beside(chunk, rows, places, False, LOOP, DTYPE)
    return less, scales


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
    UNROLL: constexpr = LOOP.UNROLL
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
    first_token, first_output = tile_corner(gl.program_id(0), places, LOOP)
    first_output += WHICH * BLOCK_N
    here = (first_output // 16).to(gl.int64) * places.block_stride
    loaded = gl.load(places.words + (here + place))
    less, scales = _factors(0, first_output + rows, places, LOOP, DTYPE)
    next_less, next_scales = less, scales
    words = arranged(loaded, lanes, BLOCK_N, COLS)
    if LOOP.EARLY:
        loaded = gl.load(places.words + here + CHUNK + place)
    left = operand(wide(words, less[0], scales[0], 0, LOOP, DTYPE), DTYPE, LEFT)
    acc = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_T], gl.float32, MMA))
    for tile in range(gl.program_id(0), tile_count(places, LOOP), gl.num_programs(0)):
        next_token, next_output = tile_corner(tile + gl.num_programs(0), places, LOOP)
        next_output += WHICH * BLOCK_N
        there = (next_output // 16).to(gl.int64) * places.block_stride
        if LOOP.GROUP == 0:
            row_scales = gl.load(places.scales + first_output + sum_rows)
        if LOOP.BIAS:
            bias = gl.load(places.bias + first_output + sum_rows)
        for step in range(places.chunks // UNROLL):
            for unit in gl.static_range(UNROLL):
                chunk = step * UNROLL + unit
                for part in gl.static_range(PARTS):
                    mbarrier.wait(ready.index(slot), phase)
                    acc = warpgroup_mma(
                        left, xs.index(slot).permute((1, 0)), acc, use_acc=chunk + part > 0, is_async=True
                    )
                    acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
                    if unit + part > 0:
                        mbarrier.arrive(free.index(before), count=1)
                    if part + 1 == PARTS:
                        words = arranged(loaded, lanes, BLOCK_N, COLS)
                        less, scales = next_less, next_scales
                        if LOOP.EARLY:
                            second = chunk + 2 - gl.where(chunk + 2 >= places.chunks, places.chunks, 0)
                            from_here = gl.where(second == chunk + 2, here, there)
                            loaded = gl.load(places.words + (from_here + second * CHUNK + place))
                        pairs = wide(words, less[0], scales[0], 0, LOOP, DTYPE)
                        if unit + 1 == UNROLL:
                            # Registers of the loop's next product are written while none runs: otherwise the
                            # compiler waits for every product where it is issued.
                            acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(acc,)))
                            mbarrier.arrive(free.index(slot), count=1)
                            pairs = pairs ^ places.zero
                    else:
                        own_less = less[(part + 1) * GROUPS // PARTS]
                        own_scales = scales[(part + 1) * GROUPS // PARTS]
                        pairs = wide(words, own_less, own_scales, part + 1, LOOP, DTYPE)
                    left = operand(pairs, DTYPE, LEFT)
                    if part == 0:  # after the last chunk the next tile's first
                        ends = chunk + 1 == places.chunks
                        later = gl.where(ends, 0, chunk + 1)
                        if not LOOP.EARLY:
                            at = gl.where(ends, there, here + later * CHUNK) + place
                            loaded = gl.load(places.words + at)
                        at_rows = gl.where(ends, next_output, first_output) + rows
                        next_less, next_scales = _factors(later, at_rows, places, LOOP, DTYPE)
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


@gluon.jit(do_not_specialize=["tokens", "chunks", "zero"])
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
    chunks: tensor,
    zero: tensor,
    LOOP: constexpr,
) -> None:
    """Tiles of BLOCK_T rows and BLOCK_N outputs, as far apart as there are programs."""
    STAGES: constexpr = LOOP.STAGES
    places = Places(
        words, block_stride, scales, zeros, scale_stride, bias, tokens, outputs, columns, chunks, zero
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
        [(_first, (everything, LOOP)), (_second, (everything, LOOP)), (copy_rows, (everything, LOOP))],
        [4, 1],
        [240, 24],
    )
