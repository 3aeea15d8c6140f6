"""The kernel of packed_prompt.py: one warp of a program copies rows of x and words of the weight to shared
memory, two groups of four warps multiply half of a tile's outputs each, y^T = W · x^T.

A group unpacks the next step's words into registers (prompt_words.py) while the product of this step runs. No
wide copy of the weight is written. SiLU has two warps of its own (prompt_gates.py).

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

from ingot.kernels.product.packed.prompt_gates import STAGED, apply_gates
from ingot.kernels.product.packed.prompt_tiles import (
    Places,
    PromptLoop,
    copy_rows,
    tile_corner,
    tile_count,
)
from ingot.kernels.product.packed.prompt_words import (
    less_of,
    loaded_words,
    operand,
    own_rows,
    pair_layout,
    twice,
    wide,
)


@triton.constexpr_function
def _groups(loop: PromptLoop) -> int:
    """Groups of columns in a chunk."""
    return max(loop.COLS * 16 // loop.BITS // loop.GROUP, 1) if loop.GROUP else 1


@gluon.jit
def _beside(
    chunk: tensor, rows: tensor, places: tensor, ZEROS: constexpr, LOOP: constexpr, DTYPE: constexpr
) -> tensor:
    """Scales of a chunk's groups, or what takes the zeros away, in both halves of 32 bits: a tuple."""
    WIDTH: constexpr = LOOP.COLS * 16 // LOOP.BITS
    GROUPS: constexpr = _groups(LOOP)
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
        for _own in gl.static_range(_groups(LOOP)):
            less = less + (less_of(middle, LOOP.BITS, DTYPE),)  # noqa: RUF005
    scales = less
    if LOOP.GROUP > 0:
        scales = _beside(chunk, rows, places, False, LOOP, DTYPE)
    return less, scales


@gluon.jit
def _multiply(WHICH: constexpr, everything: tensor, LOOP: constexpr) -> None:
    """One group's half of the outputs, tile by tile: a tile's first words are unpacked beside the last step
    of the one before.
    """
    _x_desc, _w_desc, y_desc, xs, words_kept, staged, bars, places = everything
    ready, free, stored, taken, filled, emptied = bars
    DTYPE: constexpr = y_desc.dtype
    BLOCK_T: constexpr = LOOP.BLOCK_T
    BLOCK_N: constexpr = LOOP.BLOCK_N // 2
    WIDTH: constexpr = BLOCK_N // 2 if LOOP.GATED else BLOCK_N
    PARTS: constexpr = 16 // LOOP.BITS
    GROUPS: constexpr = _groups(LOOP)
    UNROLL: constexpr = LOOP.UNROLL
    MMA: constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_T, 16]
    )
    LEFT: constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    ROWS: constexpr = gl.SliceLayout(1, pair_layout(BLOCK_N, LOOP.COLS))
    SUM_ROWS: constexpr = gl.SliceLayout(1, MMA)
    apart = places.outputs // 2  # up's outputs from the gate's
    kept = words_kept._reinterpret(gl.int32, [2 * LOOP.WORDS, 4, LOOP.COLS // 4, 32], words_kept.type.layout)
    rows, sum_rows = own_rows(BLOCK_N, apart, LOOP, ROWS), own_rows(BLOCK_N, apart, LOOP, SUM_ROWS)
    slot = 0
    phase = 0
    before = slot
    turn = 0
    first_token, first_output = tile_corner(gl.program_id(0), places, LOOP)
    first_output += WHICH * WIDTH
    word_slot = 0
    word_phase = 0
    less, scales = _factors(0, first_output + rows, places, LOOP, DTYPE)
    next_less, next_scales = less, scales
    mbarrier.wait(stored.index(word_slot), word_phase)
    words = loaded_words(kept.index(2 * word_slot + WHICH), LOOP)
    mbarrier.arrive(taken.index(word_slot), count=1)
    word_slot += 1
    left = operand(wide(words, less[0], scales[0], 0, LOOP, DTYPE), DTYPE, LEFT)
    acc = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_T], gl.float32, MMA))
    for tile in range(gl.program_id(0), tile_count(places, LOOP), gl.num_programs(0)):
        next_token, next_output = tile_corner(tile + gl.num_programs(0), places, LOOP)
        next_output += WHICH * WIDTH
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
                        mbarrier.wait(stored.index(word_slot), word_phase)
                        words = loaded_words(kept.index(2 * word_slot + WHICH), LOOP)
                        mbarrier.arrive(taken.index(word_slot), count=1)
                        word_slot += 1
                        if word_slot == LOOP.WORDS:
                            word_slot = 0
                            word_phase ^= 1
                        less, scales = next_less, next_scales
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
                        if LOOP.ADDS:
                            tma.store_wait(0)
                            bar = filled.index(WHICH)
                            mbarrier.expect(bar, BLOCK_T * WIDTH * 2, pred=ends)
                            tma.async_copy_global_to_shared(
                                y_desc, [first_token, first_output], bar, staged.index(WHICH), pred=ends
                            )
                        at_rows = gl.where(ends, next_output, first_output) + rows
                        next_less, next_scales = _factors(later, at_rows, places, LOOP, DTYPE)
                    before = slot
                    slot += 1
                    if slot == LOOP.STAGES:
                        slot = 0
                        phase ^= 1
        if LOOP.GATED:
            mbarrier.wait(emptied.index(WHICH), turn ^ 1)
            turn ^= 1
        sums = warpgroup_mma_wait(0, deps=(acc,))
        acc = warpgroup_mma_init(sums)
        if LOOP.GROUP == 0:
            sums *= row_scales.to(gl.float32)[:, None]
        if LOOP.BIAS:
            sums += bias.to(gl.float32)[:, None]
        stage = staged.index(WHICH)
        if LOOP.GATED:
            stage.store(gl.permute(sums.to(DTYPE), (1, 0)))
            mbarrier.arrive(filled.index(WHICH), count=1)
        elif LOOP.ADDS:
            mbarrier.wait(filled.index(WHICH), turn)
            turn ^= 1
            _stage_sum(sums, 0, stage)
        else:
            tma.store_wait(0)
            stage.store(gl.permute(sums.to(DTYPE), (1, 0)))
        if not LOOP.GATED:
            fence_async_shared()
            tma.async_copy_shared_to_global(y_desc, [first_token, first_output], stage)
        first_token, first_output = next_token, next_output
    tma.store_wait(0)


@gluon.jit
def _stage_sum(sums: tensor, FIRST: constexpr, stage: tensor) -> None:
    """Add sums to the rows that are in shared memory, a few at a time, because registers are taken."""
    BLOCK_N: constexpr = sums.shape[0]
    BLOCK_T: constexpr = sums.shape[1]
    if BLOCK_T > 64:
        HALF: constexpr = BLOCK_T // 2
        LAYOUT: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        low, high = gl.split(gl.permute(gl.reshape(sums, (BLOCK_N, 2, HALF)), (0, 2, 1)))
        _stage_sum(gl.convert_layout(low, LAYOUT), FIRST, stage)
        _stage_sum(gl.convert_layout(high, LAYOUT), FIRST + HALF, stage)
    else:
        rows = stage.slice(FIRST, BLOCK_T)
        TURNED: constexpr = sums.permute((1, 0)).type.layout
        before = gl.convert_layout(rows.load(TURNED).permute((1, 0)), sums.type.layout)
        rows.store((sums + before.to(gl.float32)).to(stage.dtype).permute((1, 0)))


@gluon.jit
def _first(everything: tensor, LOOP: constexpr) -> None:
    _multiply(0, everything, LOOP)


@gluon.jit
def _second(everything: tensor, LOOP: constexpr) -> None:
    _multiply(1, everything, LOOP)


@gluon.jit(do_not_specialize=["tokens", "chunks", "zero"])
def packed_prompt_kernel(
    x_desc: tensor,
    w_desc: tensor,
    y_desc: tensor,
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
    WORDS: constexpr = LOOP.WORDS
    places = Places(scales, zeros, scale_stride, bias, tokens, outputs, columns, chunks, zero)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, LOOP.BLOCK_T, LOOP.COLS], x_desc.layout)
    BLOCKS: constexpr = w_desc.block_shape[0]
    BOXES: constexpr = LOOP.BLOCK_N // (16 * BLOCKS)
    words = gl.allocate_shared_memory(gl.int32, [BOXES * WORDS, BLOCKS, LOOP.COLS // 4, 32], w_desc.layout)
    staged = gl.allocate_shared_memory(y_desc.dtype, [2, LOOP.BLOCK_T, LOOP.BLOCK_N // 2], STAGED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [WORDS, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [WORDS, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(filled.index(group), count=1)
        mbarrier.init(emptied.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for place in gl.static_range(WORDS):
        mbarrier.init(stored.index(place), count=1)
        mbarrier.init(loaded.index(place), count=2)
    fence_async_shared()
    bars = (ready, free, stored, loaded, filled, emptied)
    everything = (x_desc, w_desc, y_desc, xs, words, staged, bars, places)
    if LOOP.GATED:
        gl.warp_specialize(
            [
                (_first, (everything, LOOP)),
                (_second, (everything, LOOP)),
                (copy_rows, (everything, LOOP)),
                (apply_gates, (everything, LOOP)),
            ],
            [4, 1, 2],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [(_first, (everything, LOOP)), (_second, (everything, LOOP)), (copy_rows, (everything, LOOP))],
            [4, 1],
            [240, 24],
        )
