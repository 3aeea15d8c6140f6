"""The product of one row with weights of 8 or 4 bits, whose words stream through shared memory.

A program walks tiles of one or two blocks of 16 outputs. The copy engine fetches a stage, the words of 8
chunks of a block, several stages ahead and before the wait for the previous kernel. Each of 8 warps
multiplies the chunk that is its own by x in shared memory, with all 8 columns of the tensor cores the same;
the warps' sums are added once per tile (stream_words.py).

    stream_kernel[(programs,)](words, *arguments, LOOP=StreamLoop(…), num_warps=8)
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc, var-annotated"
# (Tuples grow in jitted loops.)
from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language import constexpr, tensor

from ingot.kernels.gluon_overlap import start_next, wait_for_previous
from ingot.kernels.product.few_rows.stream_words import add_block, thread_layout
from ingot.kernels.product.product_arguments import Heads

WARPS = gl.constexpr(8)
CHUNK_LINES = gl.constexpr(16)  # of 128 bytes, in 16 rows of a chunk
LINE_WORDS = gl.constexpr(32)  # of 32 bits
STAGE_BYTES = gl.constexpr(16384)  # 8 chunks of a block


class StreamLoop(NamedTuple):
    """The constants of ``stream_kernel``.

    Attributes:
        BITS, GROUP: of the weight: 4 bits in groups of 64 or 128, or 8 bits with one scale per row.
        K, STEPS: columns, and stages over all of them.
        TILES, PER: tiles, and at most so many per program.
        BLOCKS: blocks of 16 rows per tile.
        SPAN: 0, or how many blocks lie between the two of a tile: gate and up, or the halves of a head.
        STAGES: stages in shared memory, each of one block.
        OVERLAP: as in launch_overlap.py.
    """

    BITS: int
    GROUP: int
    K: int
    STEPS: int
    TILES: int
    PER: int
    BLOCKS: int
    STAGES: int
    SPAN: int
    OVERLAP: int


LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


@triton.constexpr_function
def row_layout() -> gl.BlockedLayout:
    """Fragments of x [1, 8 warps, 1, 4, 4] in every thread that multiplies by them: in all 8 columns."""
    return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 8, 4, 1], [1, 8, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.jit
def _keep(x: tensor, row: tensor, LOOP: constexpr) -> None:
    """All of x in shared memory, by steps, parts and pieces [STEPS, PIECES, 8 warps, 1, 4, 4 words]; zeros
    from column K on.
    """
    K: constexpr = LOOP.K
    STEPS: constexpr = LOOP.STEPS
    PIECES: constexpr = 32 // LOOP.BITS
    place = gl.arange(0, PIECES * 32, gl.SliceLayout(1, thread_layout()))
    column = place % 32 // 4 * (PIECES * 32) + place // 32 * 32 + place % 4 * 8
    places = x.to(gl.pointer_type(gl.int32)) + column[:, None] // 2
    places = places + gl.arange(0, 4, gl.SliceLayout(0, thread_layout()))[None, :]
    found = ()
    for step in gl.static_range(STEPS):
        there = (column + step * (PIECES * 256) < K)[:, None]
        found = found + (gl.load(places + step * (PIECES * 128), mask=there, other=0),)  # noqa: RUF005
    for step in gl.static_range(STEPS):
        row.index(step).store(gl.reshape(found[step], (PIECES, 8, 1, 4, 4)))


@triton.constexpr_function
def norm_layout() -> gl.BlockedLayout:
    """A row as rms_norm.py's kernel of 8 warps has it: its sum of squares is added up in the same order."""
    return gl.BlockedLayout([8], [32], [8], [0])


@gluon.jit
def _keep_normed(x: tensor, row: tensor, weight: tensor, eps: tensor, LOOP: constexpr) -> None:
    """As ``_keep``, of RMSNorm(x) with ``weight`` [K]; K is whole steps."""
    K: constexpr = LOOP.K
    STEPS: constexpr = LOOP.STEPS
    PIECES: constexpr = 32 // LOOP.BITS
    FLAT: constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    s = gl.load(x + gl.arange(0, K, norm_layout())).to(gl.float32)
    rstd = gl.rsqrt(gl.sum(s * s, axis=0) / K + eps)
    y = ((s * rstd).to(gl.bfloat16).to(gl.float32) * weight.to(gl.float32)).to(gl.bfloat16)
    y = gl.permute(gl.reshape(y, (STEPS, 8, PIECES, 4, 8)), (0, 2, 1, 3, 4))
    pairs = row._reinterpret(gl.bfloat16, [STEPS, PIECES, 8, 1, 4, 8], FLAT)
    pairs.store(gl.reshape(y, (STEPS, PIECES, 8, 1, 4, 8)))


@gluon.jit
def _columns(row: tensor, step: tensor, LOOP: constexpr) -> tensor:
    """Every warp's chunk of x, by parts and pieces: a tuple of [256, 4] int32."""
    PIECES: constexpr = 32 // LOOP.BITS
    found = ()
    for piece in gl.static_range(PIECES):
        own = row.index(step).slice(piece, 1).load(row_layout())
        own = own | gl.zeros((1, 8, 8, 4, 4), gl.int32, row_layout())
        found = found + (gl.convert_layout(gl.reshape(own, (256, 4)), thread_layout()),)  # noqa: RUF005
    return found


@gluon.jit
def _block(tile: tensor, INDEX: constexpr, LOOP: constexpr) -> tensor:
    """Block INDEX of 16 rows of a tile."""
    SPAN: constexpr = LOOP.SPAN
    BLOCKS: constexpr = LOOP.BLOCKS
    return tile // SPAN * (2 * SPAN) + tile % SPAN + INDEX * SPAN if SPAN > 0 else tile * BLOCKS + INDEX


@gluon.jit
def _scales(
    scales: tensor, zeros: tensor, stride: tensor, tile: tensor, step: tensor, LOOP: constexpr
) -> tensor:
    """The scales, and zeros if there are some, of a stage's groups, those of two rows in a word: a tuple of
    [256] by blocks and groups; none without groups.
    """
    THREAD: constexpr = thread_layout()
    BLOCKS: constexpr = LOOP.BLOCKS
    found = ()
    if LOOP.GROUP > 0:
        GROUPS: constexpr = 256 // LOOP.GROUP
        CHUNKS: constexpr = (LOOP.K + 255) // 256
        thread = gl.arange(0, 256, gl.SliceLayout(1, THREAD))
        chunk = gl.minimum(step * WARPS + thread // 32, CHUNKS - 1)
        tile = gl.minimum(tile, LOOP.TILES - 1)
        for index in gl.static_range(BLOCKS):
            block = _block(tile, index, LOOP)
            for group in gl.static_range(GROUPS):
                row = chunk * GROUPS + group
                if LOOP.K % 256 != 0:
                    row = gl.minimum(row, (LOOP.K - 1) // LOOP.GROUP)
                place = row * (stride // 2) + block * 8 + thread % 32 // 4
                found = found + (gl.load(scales.to(gl.pointer_type(gl.int32)) + place),)  # noqa: RUF005
                if zeros is not None:
                    found = found + (gl.load(zeros.to(gl.pointer_type(gl.int16)) + place),)  # noqa: RUF005
    return found


@gluon.jit
def _fetch(
    words: tensor,
    stages: tensor,
    ready: tensor,
    tile: tensor,
    step: tensor,
    INDEX: constexpr,
    slot: tensor,
    LOOP: constexpr,
) -> None:
    """Ask for a stage's words, of block INDEX, which the barrier expects; none of tiles from TILES on."""
    LINES_PER_BLOCK: constexpr = (LOOP.K + 1024 // LOOP.BITS - 1) // (1024 // LOOP.BITS) * CHUNK_LINES
    line = _block(tile, INDEX, LOOP) * LINES_PER_BLOCK + step * (WARPS * CHUNK_LINES)
    place, wanted = stages.index(slot), tile < LOOP.TILES
    tma.async_copy_global_to_shared(words, [line, 0], ready.index(slot), place, pred=wanted)


@triton.constexpr_function
def sum_layout() -> gl.BlockedLayout:
    """A block's sums by warps [8, 128]: those of all warps in one thread."""
    return gl.BlockedLayout([8, 1], [1, 32], [1, 8], [1, 0])


@gluon.jit
def _outputs(tile: tensor, INDEX: constexpr, LOOP: constexpr) -> tensor:
    """Of the 128 sums of a block the row of the weight, and whether they are its first column's."""
    place = gl.arange(0, 128, gl.SliceLayout(0, sum_layout()))
    output = _block(tile, INDEX, LOOP) * 16 + place // 16 * 2 + place % 4 // 2
    return output, place % 16 // 4 * 2 + place % 2 == 0


@gluon.jit
def _beforehand(tile: tensor, residual: tensor, scales: tensor, bias: tensor, LOOP: constexpr) -> tensor:
    """What a tile's sums need at last, asked for at its start, by blocks: scales, bias and residual of
    outputs.
    """
    BLOCKS: constexpr = LOOP.BLOCKS
    factors, biases, added = (), (), ()
    for index in gl.static_range(BLOCKS):
        output, _first = _outputs(tile, index, LOOP)
        if LOOP.GROUP == 0:
            factors = factors + (gl.load(scales + output),)  # noqa: RUF005
        if bias is not None:
            biases = biases + (gl.load(bias + output),)  # noqa: RUF005
        if residual is not None:
            added = added + (gl.load(residual + output),)  # noqa: RUF005
    return factors, biases, added


@gluon.jit
def _sums(acc: tensor, parts: tensor, before: tensor, LOOP: constexpr) -> tensor:
    """By blocks the sums over the warps, plus bias and residual."""
    BLOCKS: constexpr = LOOP.BLOCKS
    factors, biases, added = before
    for index in gl.static_range(BLOCKS):
        parts.index(index).store(gl.reshape(acc[index], (8, 128)))
    sums = ()
    for index in gl.static_range(BLOCKS):
        total = gl.sum(parts.index(index).load(sum_layout()), axis=0)
        if LOOP.GROUP == 0:
            total *= factors[index].to(gl.float32)
        if len(biases) > 0:
            total += biases[index].to(gl.float32)
        if len(added) > 0:
            total += added[index].to(gl.float32)
        sums = sums + (total,)  # noqa: RUF005
    return sums


@gluon.jit
def _store(sums: tensor, tile: tensor, y: tensor, LOOP: constexpr) -> None:
    """Store y, or silu(gate) · up."""
    DTYPE: constexpr = y.dtype.element_ty
    output, first = _outputs(tile, 0, LOOP)
    total = sums[0]
    if LOOP.SPAN > 0:
        gate, up = total.to(DTYPE).to(gl.float32), sums[1].to(DTYPE).to(gl.float32)
        total = (gate / (1.0 + gl.exp(-gate))).to(DTYPE).to(gl.float32) * up
    gl.store(y + output, total.to(DTYPE), mask=first)


@gluon.jit
def _turns(tile: tensor, out: tensor, LOOP: constexpr, SHAPE: constexpr) -> tensor:
    """Cosines and sines of a tile's pairs, and the slot, asked for at its start."""
    output, _first = _outputs(tile, 0, LOOP)
    place = gl.load(out.table_rows) * out.table_stride + output % SHAPE.HEAD_DIM
    return gl.load(out.table + place), gl.load(out.table + place + SHAPE.HALF), gl.load(out.slots)


@gluon.jit
def _store_heads(
    sums: tensor, turns: tensor, tile: tensor, out: tensor, LOOP: constexpr, SHAPE: constexpr
) -> None:
    """Store pairs of channels, rotated, to q or into the cache, as product_epilogues.py does."""
    DTYPE: constexpr = out.q.dtype.element_ty
    output, first = _outputs(tile, 0, LOOP)
    cos, sin, slot = turns
    head, pair = tile // LOOP.SPAN, output % SHAPE.HEAD_DIM
    a, b = sums[0].to(DTYPE).to(gl.float32), sums[1].to(DTYPE).to(gl.float32)
    if head < SHAPE.HEADS + SHAPE.KV_HEADS:
        rotated = a * cos - b * sin
        b = b * cos + a * sin
        a = rotated
    a, b = a.to(DTYPE), b.to(DTYPE)
    if head < SHAPE.HEADS:
        places = out.q + head * SHAPE.HEAD_DIM + pair
        gl.store(places, a, mask=first)
        gl.store(places + SHAPE.HALF, b, mask=first)
    else:
        block = slot // SHAPE.BLOCK_SIZE
        offset = block * out.block_stride + (slot - block * SHAPE.BLOCK_SIZE) * out.token_stride + pair
        real = first & (slot >= 0)
        if head < SHAPE.HEADS + SHAPE.KV_HEADS:
            places = out.keys + offset + (head - SHAPE.HEADS) * out.head_stride
        else:
            places = out.value_cache + offset + (head - SHAPE.HEADS - SHAPE.KV_HEADS) * out.head_stride
        gl.store(places, a, mask=real)
        gl.store(places + SHAPE.HALF, b, mask=real)


@gluon.jit
def _step(everything: tensor, tile: tensor, step: tensor, state: tensor, LOOP: constexpr) -> tensor:
    """Add the products of every block's stage, and ask for the stage that follows in its place."""
    words, stages, ready, scales, zeros, scale_stride, row = everything
    slot, phase, acc, queue = state
    STAGES: constexpr = LOOP.STAGES
    STEPS: constexpr = LOOP.STEPS
    BLOCKS: constexpr = LOOP.BLOCKS
    ZEROS: constexpr = zeros is not None
    programs = gl.num_programs(0)
    now = queue
    then = tile + (step + 1) // STEPS * programs
    queue = _scales(scales, zeros, scale_stride, then, (step + 1) % STEPS, LOOP)
    sums = ()
    for index in gl.static_range(BLOCKS):
        mbarrier.wait(ready.index(slot), phase)
        later = step + (index + STAGES) // BLOCKS
        follows = tile + later // STEPS * programs
        if LOOP.PER * STEPS * BLOCKS > STAGES:
            mbarrier.expect(ready.index(slot), STAGE_BYTES, pred=follows < LOOP.TILES)
        x = _columns(row, step, LOOP)
        total = add_block(stages.index(slot), x, now, acc[index], index, ZEROS, LOOP)
        if LOOP.PER * STEPS * BLOCKS > STAGES:
            _fetch(words, stages, ready, follows, later % STEPS, (index + STAGES) % BLOCKS, slot, LOOP)
        sums = sums + (total,)  # noqa: RUF005
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return slot, phase, sums, queue


@gluon.jit
def stream_kernel(
    words: tensor,
    x: tensor,
    scales: tensor,
    zeros: tensor,
    scale_stride: tensor,
    y: tensor,
    residual: tensor,
    bias: tensor,
    norm: tensor,
    eps: tensor,
    heads: tensor,
    LOOP: constexpr,
    SHAPE: constexpr,
) -> None:
    """Tiles as far apart as there are programs, PER of each at most.

    With ``norm`` [K] x is normalised first. With SHAPE, a ``HeadShape``, ``heads`` says where queries, keys
    and values go: ``Heads``.
    """
    STAGES: constexpr = LOOP.STAGES
    STEPS: constexpr = LOOP.STEPS
    BLOCKS: constexpr = LOOP.BLOCKS
    FLAT: constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ROW: constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    stages = gl.allocate_shared_memory(gl.int32, [STAGES, 128, LINE_WORDS], words.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    parts = gl.allocate_shared_memory(gl.float32, [BLOCKS, 8, 128], FLAT)
    row = gl.allocate_shared_memory(gl.int32, [STEPS, 32 // LOOP.BITS, 8, 1, 4, 4], ROW)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    start_next(LOOP.OVERLAP)
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    for stage in gl.static_range(STAGES):
        wanted = first + stage // BLOCKS // STEPS * programs < LOOP.TILES
        mbarrier.expect(ready.index(stage), STAGE_BYTES, pred=wanted)
    for stage in gl.static_range(STAGES):
        tile = first + stage // BLOCKS // STEPS * programs
        _fetch(words, stages, ready, tile, stage // BLOCKS % STEPS, stage % BLOCKS, stage, LOOP)
    queue = _scales(scales, zeros, scale_stride, first, 0, LOOP)
    if norm is not None:
        norm = gl.load(norm + gl.arange(0, LOOP.K, norm_layout()))
    wait_for_previous(LOOP.OVERLAP)
    if norm is not None:
        _keep_normed(x, row, norm, eps, LOOP)
    else:
        _keep(x, row, LOOP)
    everything = words, stages, ready, scales, zeros, scale_stride, row
    slot = 0
    phase = 0
    for turn in range(LOOP.PER):
        tile = first + turn * programs
        if tile < LOOP.TILES:
            before = _beforehand(tile, residual, scales, bias, LOOP)
            if SHAPE is not None:
                turns = _turns(tile, Heads(*heads), LOOP, SHAPE)
            acc = ()
            for _index in gl.static_range(BLOCKS):
                acc = acc + (gl.zeros((256, 4), gl.float32, thread_layout()),)  # noqa: RUF005
            for step in range(STEPS):
                state = slot, phase, acc, queue
                slot, phase, acc, queue = _step(everything, tile, step, state, LOOP)
            sums = _sums(acc, parts, before, LOOP)
            if SHAPE is not None:
                _store_heads(sums, turns, tile, Heads(*heads), LOOP, SHAPE)
            else:
                _store(sums, tile, y, LOOP)
