"""Attention of every position to all positions of its input, on Hopper, for heads of 64 channels.

A program takes 192 queries of one head at a time, or 128. One warp copies queries and tiles of keys and
values to shared memory, straight from the rows that their product wrote. Three groups of four warps, or two,
have 64 queries each, and take turns to start products: while one exponentiates, others multiply.

    if takes_windows(joined, inputs, heads): out = encoder_attention(joined, inputs, heads)
"""

from __future__ import annotations

# mypy: disable-error-code="misc"
# (Names are bound again with other layouts in jitted code.)
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr, tensor

from ingot.kernels.attention.score_exponents import LEAST_SCORE, LOG2_E
from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect_range,
    expect_rows,
    multiprocessors,
    runs_on_gpu,
)
from ingot.kernels.tiles.prefill_tiles import on_hopper
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT

HEAD_DIM = 64
LEAST_POSITIONS = 256  # an item's first tile of keys must not be its last
KEYS = gl.constexpr(128)  # of a tile
STAGES = gl.constexpr(3)  # tiles of keys, and of values, in shared memory
QUERY_STAGES = gl.constexpr(2)  # items whose queries are in shared memory


class EncoderShape(NamedTuple):
    """Constants of the kernel: groups of four warps, with 64 queries each, and the type of all operands, as
    the kernel's language names it.
    """

    GROUPS: int
    DTYPE: Any


@gluon.jit
def _place(item: tensor, work: tensor, SHAPE: constexpr) -> tensor:
    """An item's input, head and first query."""
    heads, positions = work
    tiles = gl.cdiv(positions, SHAPE.GROUPS * 64)
    rest = item // tiles
    return rest // heads, rest % heads, item % tiles * (SHAPE.GROUPS * 64)


@gluon.jit
def _items(inputs: tensor, work: tensor, SHAPE: constexpr) -> tensor:
    heads, positions = work
    return inputs * heads * gl.cdiv(positions, SHAPE.GROUPS * 64)


@gluon.jit
def _fetch(everything: tensor, SHAPE: constexpr) -> None:
    """Copy every item's queries, keys and values, as soon as their place in shared memory is free."""
    q_desc, kv_desc, _out_desc, queries, keys, values, _turns, _staged, inputs, work, _scale = everything
    heads, positions = work
    q_tiles, _, q_full, q_empty = queries
    k_tiles, _, k_full, k_empty = keys
    v_tiles, _, v_full, v_empty = values
    BYTES: constexpr = KEYS * 64 * 2
    GROUPS: constexpr = SHAPE.GROUPS
    size = heads * 64
    count = 0
    taken = 0
    for item in range(gl.program_id(0), _items(inputs, work, SHAPE), gl.num_programs(0)):
        one, head, first = _place(item, work, SHAPE)
        column = head * 64
        slot = taken % QUERY_STAGES
        mbarrier.wait(q_empty.index(slot), ((taken // QUERY_STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), SHAPE.GROUPS * 64 * 64 * 2)
        for group in gl.static_range(GROUPS):
            into = q_tiles.index(slot * GROUPS + group)
            tma.async_copy_global_to_shared(
                q_desc, [one, first + group * 64, column], q_full.index(slot), into
            )
        for tile in range(0, positions, KEYS):
            slot = count % STAGES
            phase = ((count // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), BYTES)
            tma.async_copy_global_to_shared(
                kv_desc, [one, tile, size + column], k_full.index(slot), k_tiles.index(slot)
            )
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), BYTES)
            tma.async_copy_global_to_shared(
                kv_desc, [one, tile, 2 * size + column], v_full.index(slot), v_tiles.index(slot)
            )
            count += 1
        taken += 1  # noqa: SIM113


@gluon.jit
def _start_scores(q: tensor, keys: tensor, count: tensor, SHAPE: constexpr) -> tensor:
    """Start the product of queries with a tile's keys, once they are there."""
    LAYOUT: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    _, tiles, full, _ = keys
    slot = count % STAGES
    mbarrier.wait(full.index(slot), (count // STAGES) & 1)
    none = gl.zeros([64, KEYS], gl.float32, LAYOUT)
    return warpgroup_mma(q, tiles.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _start_sums(acc: tensor, weights: tensor, values: tensor, count: tensor, SHAPE: constexpr) -> tensor:
    """Start adding the product of weights with a tile's values, once they are there."""
    _, tiles, full, _ = values
    slot = count % STAGES
    mbarrier.wait(full.index(slot), (count // STAGES) & 1)
    return warpgroup_mma(weights, tiles.index(slot), acc, is_async=True)


@gluon.jit
def _weigh(
    scores: tensor,
    top: tensor,
    total: tensor,
    left: tensor,
    scale: tensor,
    MASKED: constexpr,
    SHAPE: constexpr,
) -> tensor:
    """Scores to weights, a left operand; the new maximum and sum of weights, and how older sums fade."""
    LAYOUT: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    if MASKED:
        keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where((keys < left)[None, :], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1) * scale)
    wide = gl.exp2(scores * scale - new_top[:, None])
    fade = gl.exp2(top - new_top)
    total = total * fade + gl.sum(wide, axis=1)
    weights = gl.convert_layout(wide.to(SHAPE.DTYPE), gl.DotOperandLayout(0, LAYOUT, 2))
    return weights, new_top, total, fade


@gluon.jit
def _advance(
    state: tensor,
    q: tensor,
    keys: tensor,
    values: tensor,
    turns: tensor,
    turn: tensor,
    left: tensor,
    scale: tensor,
    MASKED: constexpr,
    WHICH: constexpr,
    SHAPE: constexpr,
) -> tensor:
    """Take a tile of keys into the running softmax; values are one tile behind."""
    acc, weights, top, total, count = state
    mbarrier.wait(turns.index(WHICH), (turn & 1) ^ (1 if WHICH == 0 else 0))
    scores = _start_scores(q, keys, count, SHAPE)
    acc = _start_sums(acc, weights, values, count - 1, SHAPE)
    mbarrier.arrive(turns.index((WHICH + 1) % SHAPE.GROUPS), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(keys[3].index(count % STAGES), count=1)
    next_weights, top, total, fade = _weigh(scores, top, total, left, scale, MASKED, SHAPE)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(values[3].index((count - 1) % STAGES), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, next_weights, top, total, count + 1


@gluon.jit
def _attend(everything: tensor, WHICH: constexpr, SHAPE: constexpr) -> None:
    """All items of a program, by group WHICH."""
    _q, _kv, out_desc, queries, keys, values, turns, staged, inputs, work, scale = everything
    positions = work[1]
    SUMS: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SCORES: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    INNER: constexpr = gl.SliceLayout(1, SCORES)
    whole = (positions - 1) // KEYS  # tiles before the last
    left = positions - whole * KEYS
    count = 0
    taken = 0
    for item in range(gl.program_id(0), _items(inputs, work, SHAPE), gl.num_programs(0)):
        one, head, first = _place(item, work, SHAPE)
        slot = taken % QUERY_STAGES
        q = queries[1].index(slot * SHAPE.GROUPS + WHICH)
        mbarrier.wait(queries[2].index(slot), (taken // QUERY_STAGES) & 1)
        scores = _start_scores(q, keys, count, SHAPE)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(keys[3].index(count % STAGES), count=1)
        top = gl.full([64], LEAST_SCORE, gl.float32, INNER)
        total = gl.zeros([64], gl.float32, INNER)
        weights, top, total, _ = _weigh(scores, top, total, left, scale, False, SHAPE)
        acc = gl.zeros([64, 64], gl.float32, SUMS)
        state = (acc, weights, top, total, count + 1)
        for tile in range(1, whole):
            turn = taken * whole + tile - 1
            state = _advance(state, q, keys, values, turns, turn, left, scale, False, WHICH, SHAPE)
        turn = taken * whole + whole - 1
        state = _advance(state, q, keys, values, turns, turn, left, scale, True, WHICH, SHAPE)
        mbarrier.arrive(queries[3].index(slot), count=1)
        acc, weights, top, total, count = state
        acc = _start_sums(acc, weights, values, count - 1, SHAPE)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(values[3].index((count - 1) % STAGES), count=1)
        inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))
        tma.store_wait(0)
        staged[1].index(WHICH).store((acc * inverse[:, None]).to(SHAPE.DTYPE))
        fence_async_shared()
        place = [one, first + WHICH * 64, head * 64]
        tma.async_copy_shared_to_global(out_desc, place, staged[0].index(WHICH))
        taken += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def _ring(COUNT: constexpr, TILES: constexpr, TILE: constexpr, GROUPS: constexpr, DTYPE: constexpr) -> tensor:
    """COUNT times TILES tiles of TILE rows, as they are copied and as they are read, and barriers."""
    COPIED: constexpr = gl.NVMMASharedLayout(128, 16, 3)
    READ: constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles = gl.allocate_shared_memory(DTYPE, [COUNT * TILES, 1, TILE, 64], COPIED)
    read = tiles._reinterpret(DTYPE, [COUNT * TILES, TILE, 64], READ)
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(COUNT):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    return tiles, read, full, empty


@gluon.jit(do_not_specialize=["inputs", "heads", "positions"])
def encoder_attention_kernel(
    q_desc: tensor,
    kv_desc: tensor,
    out_desc: tensor,
    inputs: tensor,
    heads: tensor,
    positions: tensor,
    scale: tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Persistent: a program takes every so many items of queries of one head."""
    GROUPS: constexpr = SHAPE.GROUPS
    queries = _ring(QUERY_STAGES, GROUPS, 64, GROUPS, SHAPE.DTYPE)
    keys = _ring(STAGES, 1, KEYS, GROUPS, SHAPE.DTYPE)
    values = _ring(STAGES, 1, KEYS, GROUPS, SHAPE.DTYPE)
    COPIED: constexpr = gl.NVMMASharedLayout(128, 16, 3)
    READ: constexpr = gl.NVMMASharedLayout(128, 16, 2)
    written = gl.allocate_shared_memory(SHAPE.DTYPE, [GROUPS, 1, 64, 64], COPIED)
    staged = (written, written._reinterpret(SHAPE.DTYPE, [GROUPS, 64, 64], READ))
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    work = (heads, positions)
    everything = (q_desc, kv_desc, out_desc, queries, keys, values, turns, staged, inputs, work, scale)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (everything, 0, SHAPE)),
                (_attend, (everything, 1, SHAPE)),
                (_fetch, (everything, SHAPE)),
            ],
            [4, 1],
            [232, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (everything, 0, SHAPE)),
                (_attend, (everything, 1, SHAPE)),
                (_attend, (everything, 2, SHAPE)),
                (_fetch, (everything, SHAPE)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


_GL_TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_COPIED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def _descriptor(rows: torch.Tensor, inputs: int, tile: int) -> TensorDescriptor:
    """Rows [inputs * P, C] as [inputs, P, C]: copies end with an input."""
    positions, size = len(rows) // inputs, rows.shape[1]
    strides = [positions * rows.stride(0), rows.stride(0), 1]
    return TensorDescriptor(rows, [inputs, positions, size], strides, [1, tile, HEAD_DIM], _COPIED)


def takes_windows(joined: torch.Tensor, inputs: int, heads: int) -> bool:
    """Whether the kernel is the faster way for these rows: on Hopper, in 16 bits, with heads of 64 channels
    and many positions, which descriptors can read.
    """
    head_dim = joined.shape[1] // (3 * heads)
    if head_dim != HEAD_DIM or not on_hopper(joined.device, head_dim, joined.element_size()):
        return False
    places = joined.data_ptr(), joined.stride(0) * joined.element_size()
    return len(joined) >= inputs * LEAST_POSITIONS and all(p % DESCRIPTOR_ALIGNMENT == 0 for p in places)


def encoder_attention_reference(joined: torch.Tensor, inputs: int, heads: int) -> torch.Tensor:
    """The PyTorch reference of :func:`encoder_attention`."""
    parts = joined.unflatten(1, (3, heads, -1)).unflatten(0, (inputs, -1))
    query, key, value = parts.permute(2, 0, 3, 1, 4)  # [inputs, heads, P, head_dim] each
    attended = F.scaled_dot_product_attention(query, key, value)
    return attended.transpose(1, 2).flatten(2).flatten(0, 1)


def encoder_attention(joined: torch.Tensor, inputs: int, heads: int) -> torch.Tensor:
    """o = softmax(Q Kᵀ / √head_dim) V, every position over all of its input.

    Args:
        joined: [inputs * P, 3 * heads * head_dim]: queries, keys and values of all heads, inputs end to end;
            on a GPU as :func:`takes_windows` accepts.

    Returns:
        [inputs * P, heads * head_dim], dtype of ``joined``.
    """
    expect_rows("joined", joined)
    expect_range("inputs", inputs, 1)
    expect_range("heads", heads, 1)
    if len(joined) % inputs:
        raise KernelArgumentError(
            "rows are not whole inputs", seen=len(joined), allowed=f"multiples of {inputs}"
        )
    if joined.shape[1] % (3 * heads):
        raise KernelArgumentError(
            "a row has no queries, keys and values of all heads",
            seen=joined.shape[1],
            allowed=f"multiples of {3 * heads}",
        )
    if not runs_on_gpu(joined) or not len(joined):
        return encoder_attention_reference(joined, inputs, heads)
    return _launch(joined, inputs, heads)


def _groups(inputs: int, heads: int, positions: int, programs: int) -> int:
    """Two or three groups: an item of three takes a third longer. With few items the last round of two may be
    the fuller one.
    """
    rounds = [
        triton.cdiv(inputs * heads * triton.cdiv(positions, 64 * groups), programs) for groups in (2, 3)
    ]
    return 2 if 3 * rounds[0] < 4 * rounds[1] else 3


def _launch(joined: torch.Tensor, inputs: int, heads: int) -> torch.Tensor:
    positions, programs = len(joined) // inputs, multiprocessors(joined.device)
    groups = _groups(inputs, heads, positions, programs)
    out = joined.new_empty((len(joined), heads * HEAD_DIM))
    items = inputs * heads * triton.cdiv(positions, 64 * groups)
    encoder_attention_kernel[(min(items, programs),)](
        _descriptor(joined, inputs, 64),
        _descriptor(joined, inputs, KEYS.value),
        _descriptor(out, inputs, 64),
        inputs,
        heads,
        positions,
        HEAD_DIM**-0.5 * LOG2_E,
        SHAPE=EncoderShape(groups, _GL_TYPES[joined.dtype]),
        num_warps=4,
    )
    return out
