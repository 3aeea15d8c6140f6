"""What the programs of Hopper's prompt attention compute, in order.

An item is 128 queries of one head. A program takes the next one that no program has, as soon as its copies
for the one before have begun; its other warps read in shared memory what the item is.

    publish(plan, count, (head, row, left, first, upper))                 # the warp that copies
    head, row, left, first, upper = published(plan, count)                # the others
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class HopperShape(NamedTuple):
    """Constants of the kernel: heads per key-value head and so on, and the sizes of its tiles.

    Attributes:
        STAGES: tiles of keys, and of values, in shared memory.
        QUERY_STAGES: items whose queries are in shared memory.
        MOST_REQUESTS, MOST_LISTED: powers of two that requests and entries of a list do not exceed.
        CACHED_TOKENS: of one head, that the second cache holds beside what passes by.
        CAP: of ``score_factors``.
        DTYPE, CACHE_DTYPE: of q and of the cache, as the kernel's language names them.
    """

    GROUP: int
    KV_HEADS: int
    HEAD_DIM: int
    BLOCK_SIZE: int
    HAS_WINDOW: bool
    CAP: float
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    QUERY_STAGES: int
    MOST_REQUESTS: int
    MOST_LISTED: int
    NO_TILE: int
    CACHED_TOKENS: int
    DTYPE: Any
    CACHE_DTYPE: Any


@gluon.jit
def _plus(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a + b


@gluon.jit
def all_requests(
    query_start_ptr: tl.tensor, seq_lens_ptr: tl.tensor, requests: tl.tensor, SHAPE: gl.constexpr
) -> tl.tensor:
    """Of each request [MOST_REQUESTS]: its number, first row of q, queries, keys, and the tiles of queries up
    to and with its own.
    """
    MOST: gl.constexpr = SHAPE.MOST_REQUESTS
    rows = gl.arange(0, MOST, layout=gl.BlockedLayout([MOST // 32], [32], [1], [0]))
    known = rows < requests
    begin = gl.load(query_start_ptr + rows, mask=known, other=0)
    end = gl.load(query_start_ptr + rows + 1, mask=known, other=0)
    seq_lens = gl.load(seq_lens_ptr + rows, mask=known, other=0)
    ends = gl.associative_scan(gl.cdiv(end - begin, SHAPE.BLOCK_M), 0, _plus)
    return rows, begin, end - begin, seq_lens, ends


@gluon.jit
def listed_entries(list_ptr: tl.tensor, entries: tl.tensor, SHAPE: gl.constexpr) -> tl.tensor:
    """How many entries a list has up to the last one with a tile."""
    MOST: gl.constexpr = SHAPE.MOST_LISTED
    NO_TILE: gl.constexpr = SHAPE.NO_TILE
    rows = gl.arange(0, MOST, layout=gl.BlockedLayout([MOST // 32], [32], [1], [0]))
    tiles = gl.load(list_ptr + 4 * rows + 1, mask=rows < entries, other=NO_TILE)
    return gl.max(gl.where(tiles < NO_TILE, rows + 1, 0), axis=0)


@gluon.jit
def place_of(
    rest: tl.tensor, tiles: tl.tensor, seq_len: tl.tensor, heads: tl.tensor, SHAPE: gl.constexpr
) -> tl.tensor:
    """Head and tile of a request's item number ``rest``: by as many heads at once as the second cache holds
    keys and values of, and in these the last tiles, which see most keys, first.
    """
    width = gl.maximum(SHAPE.CACHED_TOKENS // gl.maximum(seq_len, 1), 1) * SHAPE.GROUP
    width = gl.minimum(width, heads)
    first = rest // (tiles * width) * width
    rest -= first * tiles
    width = gl.minimum(width, heads - first)
    return first + rest % width, tiles - 1 - rest // width


@gluon.jit
def all_items(work: tl.tuple, SHAPE: gl.constexpr) -> tl.tensor:
    """What ``item_at`` reads of all requests, and the number of items."""
    query_start_ptr, seq_lens_ptr, list_ptr, heads, requests, entries = work
    if list_ptr is None:
        known = all_requests(query_start_ptr, seq_lens_ptr, requests, SHAPE)
        items = gl.max(known[4], axis=0) * heads
    else:
        known = (entries,)
        items = listed_entries(list_ptr, entries, SHAPE) * heads
    return known, items


@gluon.jit
def item_at(item: tl.tensor, known: tl.tuple, work: tl.tuple, SHAPE: gl.constexpr) -> tl.tensor:
    """An item's head and request, its first row of q, the queries from there, the first one's position, and
    how many keys the tile sees; an entry without a tile has no queries.
    """
    query_start_ptr, seq_lens_ptr, list_ptr, heads, _, _ = work
    if list_ptr is None:
        rows, begins, counts, lens, ends = known
        tiles = gl.cdiv(counts, SHAPE.BLOCK_M)
        own = (item < ends * heads) & (item >= (ends - tiles) * heads)
        request = gl.sum(gl.where(own, rows, 0), axis=0)
        start = gl.sum(gl.where(own, begins, 0), axis=0)
        queries = gl.sum(gl.where(own, counts, 0), axis=0)
        seq_len = gl.sum(gl.where(own, lens, 0), axis=0)
        rest = item - gl.sum(gl.where(own, ends - tiles, 0), axis=0) * heads
        head, tile = place_of(rest, gl.cdiv(queries, SHAPE.BLOCK_M), seq_len, heads, SHAPE)
    else:
        head = item % heads
        request = gl.load(list_ptr + item // heads * 4)
        tile = gl.load(list_ptr + item // heads * 4 + 1)
        start = gl.load(query_start_ptr + request)
        queries = gl.load(query_start_ptr + request + 1) - start
        seq_len = gl.load(seq_lens_ptr + request)
    left = queries - tile * SHAPE.BLOCK_M
    first = seq_len - left
    upper = gl.where(left > 0, gl.maximum(gl.minimum(first + SHAPE.BLOCK_M, seq_len), 0), 0)
    return head, request, start + tile * SHAPE.BLOCK_M, left, first, upper


@gluon.jit
def publish(plan: tl.tuple, count: tl.tensor, values: tl.tuple) -> None:
    """Give the program's other warps an item: its head, first row of q, queries from there, the first one's
    position, and how many keys the tile sees; no queries: there are no more items.
    """
    slots, full, empty = plan
    head, row, left, first, upper = values
    slot = count % 2
    place = gl.arange(0, 8, layout=gl.BlockedLayout([8], [32], [1], [0]))
    packed = gl.where(place == 0, head, gl.where(place == 1, row, gl.where(place == 2, left, first)))
    mbarrier.wait(empty.index(slot), ((count // 2) & 1) ^ 1)
    slots.index(slot).store(gl.where(place == 4, upper, packed))
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def published(plan: tl.tuple, count: tl.tensor) -> tl.tensor:
    """The item number ``count`` of the program, once it is there."""
    slots, full, empty = plan
    slot = count % 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    mbarrier.wait(full.index(slot), (count // 2) & 1)
    packed = slots.index(slot).load(LAYOUT)
    mbarrier.arrive(empty.index(slot), count=1)
    place = gl.arange(0, 8, layout=LAYOUT)
    head = gl.sum(gl.where(place == 0, packed, 0), axis=0)
    row = gl.sum(gl.where(place == 1, packed, 0), axis=0)
    left = gl.sum(gl.where(place == 2, packed, 0), axis=0)
    first = gl.sum(gl.where(place == 3, packed, 0), axis=0)
    upper = gl.sum(gl.where(place == 4, packed, 0), axis=0)
    return head, row, left, first, upper


@gluon.jit
def key_tiles(first: tl.tensor, upper: tl.tensor, window: tl.tensor, SHAPE: gl.constexpr) -> tl.tensor:
    """First key tile, and the one past the last."""
    lower = first * 0
    if SHAPE.HAS_WINDOW:
        lower = gl.maximum(first - window + 1, 0) // SHAPE.BLOCK_N
    return lower, gl.cdiv(upper, SHAPE.BLOCK_N)
