"""The warp of Hopper's prompt attention that copies queries, keys and values to shared memory.

The tensor memory accelerator copies a block of the paged cache, or a tile's part of it, in one instruction
per 64 channels; barriers count its bytes. A ring is (tiles, full, empty): a barrier of ``full`` completes
when a tile is there, one of ``empty`` when no warp reads it any more.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ingot.kernels.attention.hopper_work import all_items, item_at, key_tiles, publish


@gluon.jit
def fetch(
    descriptors: tl.tuple,
    queries: tl.tuple,
    keys: tl.tuple,
    values: tl.tuple,
    plan: tl.tuple,
    work: tl.tuple,
    tables: tl.tuple,
    window: tl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Take items, publish them and fill the rings with their queries and key tiles.

    ``descriptors`` are of q, keys, values and the scales of both or None; ``work`` is as of ``item_at`` and
    ``tables`` has the block tables, their stride, and two counts, zeros, of items taken and of programs done:
    the last one leaves zeros. An item's place is read while the first key tiles of the one before are on
    their way, as many as it has stages of queries.
    """
    table_ptr, table_stride, count_ptr = tables
    known, items = all_items(work, SHAPE)
    item = gl.program_id(0)
    head, request, row, left, first, upper = item_at(gl.minimum(item, items - 1), known, work, SHAPE)
    count = 0  # of key tiles
    patched = 0
    taken = 0
    filled = 0
    while item < items:
        table = table_ptr + request.to(gl.int64) * table_stride
        source = (table, first + left, head // SHAPE.GROUP)
        lower, end = key_tiles(first, upper, window, SHAPE)
        if left > 0:
            publish(plan, taken, (head, row, left, first, upper))
            taken += 1
        if upper > 0:
            fetch_queries(descriptors[0], queries, row, head, filled, SHAPE)
            patched = fetch_pair(descriptors, keys, values, source, lower, count, patched, SHAPE)
            count += 1
            filled += 1
        begin = gl.minimum(lower + SHAPE.QUERY_STAGES, end)
        if upper > 0:
            for tile in range(lower + 1, begin):
                patched = fetch_pair(descriptors, keys, values, source, tile, count, patched, SHAPE)
                count += 1
        item = gl.num_programs(0) + gl.atomic_add(count_ptr, 1)
        head, request, row, left, first, next_upper = item_at(gl.minimum(item, items - 1), known, work, SHAPE)
        if upper > 0:
            for tile in range(begin, end):
                patched = fetch_pair(descriptors, keys, values, source, tile, count, patched, SHAPE)
                count += 1
        upper = next_upper
    publish(plan, taken, (0, 0, 0, 0, 0))
    if gl.atomic_add(count_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(count_ptr, 0)
        gl.store(count_ptr + 1, 0)


@gluon.jit
def fetch_pair(
    descriptors: tl.tuple,
    keys: tl.tuple,
    values: tl.tuple,
    source: tl.tuple,
    tile: tl.tensor,
    count: tl.tensor,
    patched: tl.tensor,
    SHAPE: gl.constexpr,
) -> tl.tensor:
    """A tile of keys, and of values."""
    _, k_desc, v_desc, k_scales, v_scales = descriptors
    patched = fetch_tile(k_desc, k_scales, keys, source, tile, count, patched, False, SHAPE)
    return fetch_tile(v_desc, v_scales, values, source, tile, count, patched, True, SHAPE)


@gluon.jit
def fetch_queries(
    desc: tl.tensor, queries: tl.tuple, row: tl.tensor, head: tl.tensor, count: tl.tensor, SHAPE: gl.constexpr
) -> None:
    """A tile of queries, in pieces of 64 queries and 64 channels."""
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    PIECES: gl.constexpr = SHAPE.BLOCK_M * HEAD_DIM // 64 // 64
    pieces, full, empty = queries
    slot = count % SHAPE.QUERY_STAGES
    arrived = full.index(slot)
    mbarrier.wait(empty.index(slot), ((count // SHAPE.QUERY_STAGES) & 1) ^ 1)
    mbarrier.expect(arrived, SHAPE.BLOCK_M * HEAD_DIM * 2)
    for piece in gl.static_range(PIECES):
        place = [row + piece * 64 // HEAD_DIM * 64, head * HEAD_DIM + piece * 64 % HEAD_DIM]
        tma.async_copy_global_to_shared(desc, place, arrived, pieces.index(slot * PIECES + piece))


@gluon.jit
def fetch_tile(
    desc: tl.tensor,
    scales: tl.tensor,
    ring: tl.tuple,
    source: tl.tuple,
    tile: tl.tensor,
    count: tl.tensor,
    patched: tl.tensor,
    VALUES: gl.constexpr,
    SHAPE: gl.constexpr,
) -> tl.tensor:
    """One tile of keys or values into its slot, once that is empty; in 8 bits with scales.

    Values past a request's last key become zeros, as a weight of zero times an old value may be no number.
    The last barrier of ``full`` is for such tiles before that, and ``patched`` their number.
    """
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    STAGES: gl.constexpr = SHAPE.STAGES
    ROWS: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    PARTS: gl.constexpr = BLOCK_N // ROWS
    WIDE: gl.constexpr = scales is None
    CHANNELS: gl.constexpr = 64 if WIDE else SHAPE.HEAD_DIM
    PIECES: gl.constexpr = SHAPE.HEAD_DIM // CHANNELS
    table, seq_len, kv_head = source
    blocks, full, empty = ring
    places = blocks if WIDE else blocks[0]
    slot = count % STAGES
    ends = VALUES & WIDE & ((tile + 1) * BLOCK_N > seq_len)
    arrived = full.index(gl.where(ends, STAGES, slot))
    mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(arrived, BLOCK_N * (SHAPE.HEAD_DIM * 2 if WIDE else SHAPE.HEAD_DIM + 4))
    for part in gl.static_range(PARTS):
        token = tile * BLOCK_N + part * ROWS
        block = gl.load(table + gl.minimum(token, seq_len - 1) // BLOCK_SIZE)
        row = (block * SHAPE.KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
        for piece in gl.static_range(PIECES):
            into = places.index((slot * PIECES + piece) * PARTS + part)
            tma.async_copy_global_to_shared(desc, [row, piece * CHANNELS], arrived, into)
        if not WIDE:
            into = blocks[1].index(slot * PARTS + part)
            tma.async_copy_global_to_shared(scales, [row // ROWS, 0], arrived, into)
    if VALUES and WIDE:  # noqa: SIM102 - one condition is known when compiling, the other is not
        if ends:
            mbarrier.wait(arrived, patched & 1)
            zero_rows(places, slot, seq_len - tile * BLOCK_N, SHAPE)
            fence_async_shared()
            mbarrier.arrive(full.index(slot), count=1)
            patched += 1
    return patched


@gluon.jit
def zero_rows(places: tl.tensor, slot: tl.tensor, begin: tl.tensor, SHAPE: gl.constexpr) -> None:
    """Zero a slot's rows from ``begin`` on, eight rows of 64 channels at a time."""
    GROUPS: gl.constexpr = SHAPE.BLOCK_N // 8
    PIECES: gl.constexpr = SHAPE.HEAD_DIM // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    eight = places._reinterpret(places.dtype, [SHAPE.STAGES * PIECES * GROUPS, 8, 64], places.layout)
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    for group in range(begin // 8, GROUPS):
        for piece in gl.static_range(PIECES):
            few = eight.index((slot * PIECES + piece) * GROUPS + group)
            old = few.load(LAYOUT)
            few.store(gl.where((group * 8 + rows < begin)[:, None], old, gl.zeros_like(old)))
