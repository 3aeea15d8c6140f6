"""Prompt attention on Hopper: warps that fetch, and two warp groups that attend (FlashAttention-3, 2024).

A program takes 128 queries of one head at a time. One warp copies queries and tiles of keys and values to
shared memory, ahead of two warp groups with 64 queries each. Keys in 8 bits pass a third group on the way.

    if serves(q, cache): out = hopper_attention(q, cache, sequences, scoring, output, listed)
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ingot.kernels.attention.attention_arguments import AttentionOutput, Scoring, Sequences, TileList
from ingot.kernels.attention.hopper_attend import attend
from ingot.kernels.attention.hopper_keys import fetch
from ingot.kernels.attention.hopper_widen import widen
from ingot.kernels.attention.hopper_work import HopperShape
from ingot.kernels.attention.int8_heads import end_constants, end_pointers
from ingot.kernels.attention.prefill_reference import NO_TILE
from ingot.kernels.attention.score_exponents import score_factors
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.kernel_checks import multiprocessors
from ingot.kernels.tiles.prefill_tiles import HOPPER_TILES, on_hopper

BLOCK_M, BLOCK_N = HOPPER_TILES["BLOCK_M"], HOPPER_TILES["BLOCK_N"]
STAGES = 2
QUERY_STAGES = 2  # but for caches in 8 bits, whose tiles take the place
MOST_REQUESTS = (32, 128)
MOST_LISTED = 512  # entries of a list of tiles: a captured step has fewer
LEAST_BLOCK = 16  # tokens of a block; in 8 bits twice as many: copies of scales end at multiples of 128 bytes
CACHED_BYTES = 1 << 25
MOST_DESCRIPTORS = 1 << 10  # kept: of keys and values of many layers, and of some places of queries
_GL_TYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
}


@gluon.jit
def barriers(COUNT: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr, MORE: gl.constexpr) -> tl.tensor:
    """Barriers ``full`` and ``empty`` of COUNT slots, completed by so many arrivals; MORE full ones."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [COUNT + MORE, 1], LAYOUT)
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], LAYOUT)
    for slot in gl.static_range(COUNT + MORE):
        mbarrier.init(full.index(slot), count=FULL)
    for slot in gl.static_range(COUNT):
        mbarrier.init(empty.index(slot), count=EMPTY)
    return full, empty


@gluon.jit
def raw_ring(SHAPE: gl.constexpr) -> tl.tensor:
    """A ring of 8-bit tiles and their scales: by blocks, as they are copied, and whole, as they are read."""
    ROWS: gl.constexpr = min(SHAPE.BLOCK_SIZE, SHAPE.BLOCK_N)
    SLOTS: gl.constexpr = SHAPE.STAGES * SHAPE.BLOCK_N // ROWS
    BYTES: gl.constexpr = gl.NVMMASharedLayout(SHAPE.HEAD_DIM, 8, 2)
    SCALES: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    blocks = gl.allocate_shared_memory(SHAPE.CACHE_DTYPE, [SLOTS, ROWS, SHAPE.HEAD_DIM], BYTES)
    scales = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, ROWS], SCALES)
    tiles = blocks._reinterpret(SHAPE.CACHE_DTYPE, [SHAPE.STAGES, SHAPE.BLOCK_N, SHAPE.HEAD_DIM], BYTES)
    flat = scales._reinterpret(gl.float32, [SHAPE.STAGES, SHAPE.BLOCK_N], FLAT)
    full, empty = barriers(SHAPE.STAGES, 1, 1, 0)
    return ((blocks, scales), full, empty), ((tiles, flat), full, empty)


@gluon.jit
def wide_ring(SHAPE: gl.constexpr) -> tl.tensor:
    """A ring of 16-bit tiles, as they are copied and as they are read. Halves of 64 channels are apart, so
    that the rows of a block in each are contiguous.
    """
    ROWS: gl.constexpr = min(SHAPE.BLOCK_SIZE, SHAPE.BLOCK_N)
    SLOTS: gl.constexpr = SHAPE.STAGES * SHAPE.BLOCK_N // ROWS * SHAPE.HEAD_DIM // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    blocks = gl.allocate_shared_memory(SHAPE.DTYPE, [SLOTS, ROWS, 64], LAYOUT)
    tiles = blocks._reinterpret(SHAPE.DTYPE, [SHAPE.STAGES, SHAPE.BLOCK_N, SHAPE.HEAD_DIM], LAYOUT)
    full, empty = barriers(SHAPE.STAGES, 1, 2, 1)
    return (blocks, full, empty), (tiles, full, empty)


@gluon.jit(do_not_specialize=["heads", "requests", "entries", "table_stride", "window"])
def hopper_attention_kernel(
    q_desc: tl.tensor,
    k_desc: tl.tensor,
    v_desc: tl.tensor,
    k_scale_desc: tl.tensor,
    v_scale_desc: tl.tensor,
    q_ptr: tl.tensor,
    table_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    list_ptr: tl.tensor,
    count_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    out_zero_ptr: tl.tensor,
    heads: tl.tensor,
    requests: tl.tensor,
    entries: tl.tensor,
    table_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    STATIC: gl.constexpr,
    BITS: gl.constexpr,
    SHAPE: gl.constexpr,
) -> None:
    """Persistent: a program takes an item, 128 queries of a head, after another."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PIECES: gl.constexpr = SHAPE.BLOCK_M * SHAPE.HEAD_DIM // 64 // 64
    NARROW: gl.constexpr = k_scale_desc is not None
    work = (query_start_ptr, seq_lens_ptr, list_ptr, heads, requests, entries)
    tables = (table_ptr, table_stride, count_ptr)
    slots = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    plan_full, plan_empty = barriers(2, 1, 3 if NARROW else 2, 0)
    plan = (slots, plan_full, plan_empty)
    q_pieces = gl.allocate_shared_memory(SHAPE.DTYPE, [SHAPE.QUERY_STAGES * PIECES, 64, 64], WIDE)
    TILES: gl.constexpr = SHAPE.QUERY_STAGES * SHAPE.BLOCK_M // 64
    q_tiles = q_pieces._reinterpret(SHAPE.DTYPE, [TILES, 64, SHAPE.HEAD_DIM], WIDE)
    q_full, q_empty = barriers(SHAPE.QUERY_STAGES, 1, 2, 0)
    copied = (q_pieces, q_full, q_empty)
    queries = (q_tiles, q_full, q_empty)
    key_blocks, keys = wide_ring(SHAPE)
    value_blocks, values = wide_ring(SHAPE)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    descriptors = (q_desc, k_desc, v_desc, k_scale_desc, v_scale_desc)
    factors = (scale_log2, window)
    output = (out_ptr, out_scale_ptr, out_zero_ptr, q_ptr)
    if not NARROW:
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (queries, keys, values, turns, plan, factors, output, heads, 0, STATIC, BITS,
                          SHAPE)),
                (attend, (queries, keys, values, turns, plan, factors, output, heads, 1, STATIC, BITS,
                          SHAPE)),
                (fetch, (descriptors, copied, key_blocks, value_blocks, plan, work, tables, window,
                         SHAPE)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        raw_key_blocks, raw_keys = raw_ring(SHAPE)
        raw_value_blocks, raw_values = raw_ring(SHAPE)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (queries, keys, values, turns, plan, factors, output, heads, 0, STATIC, BITS,
                          SHAPE)),
                (attend, (queries, keys, values, turns, plan, factors, output, heads, 1, STATIC, BITS,
                          SHAPE)),
                (widen, (raw_keys, raw_values, keys, values, plan, window, SHAPE)),
                (fetch, (descriptors, copied, raw_key_blocks, raw_value_blocks, plan, work, tables, window,
                         SHAPE)),
            ],
            [4, 4, 1],
            [200, 72, 40],
        )  # fmt: skip


def serves(q: torch.Tensor, cache: PagedCache, requests: int) -> bool:
    """Whether the kernel can take queries and cache: what copies in blocks asks of dtypes, sizes, strides."""
    if not on_hopper(q.device, q.shape[2], q.element_size()) or not q.numel() or requests > MOST_REQUESTS[-1]:
        return False
    keys, size, least = cache.keys, cache.block_size, LEAST_BLOCK if cache.scales is None else 2 * LEAST_BLOCK
    whole = keys.is_contiguous() and size >= least and not size & (size - 1)
    return whole and not any(place % 16 for place in (q.data_ptr(), 2 * q.stride(0), keys.data_ptr()))


class _Place(NamedTuple):
    """Where a descriptor's values begin, as a tensor says it; keeps no memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


@cache
def _layout(swizzle: int, bits: int) -> Any:
    return gl.NVMMASharedLayout(swizzle, bits, 2)


@lru_cache(maxsize=MOST_DESCRIPTORS)
def _made(place: _Place, rows: int, columns: int, stride: int, box: tuple[int, int], swizzle: int) -> Any:
    layout = _layout(swizzle, place.dtype.itemsize * 8)
    return TensorDescriptor(place, [rows, columns], [stride, 1], list(box), layout)


def _descriptor(
    tensor: torch.Tensor, rows: int, columns: int, stride: int, box: tuple[int, int], swizzle: int
) -> Any:
    """A step's layers and the steps after it read the same places: each descriptor is made once."""
    return _made(_Place(tensor.data_ptr(), tensor.dtype), rows, columns, stride, box, swizzle)


def cache_descriptors(cache: PagedCache) -> list[Any]:
    """Keys, values and their scales or None, as rows of tokens."""
    blocks, heads, size, head_dim = cache.keys.shape
    tokens, rows = blocks * heads * size, min(size, BLOCK_N)
    narrow = cache.scales is not None
    box, swizzle = ((rows, head_dim), head_dim) if narrow else ((rows, 64), 128)
    found = [_descriptor(t, tokens, head_dim, head_dim, box, swizzle) for t in (cache.keys, cache.values)]
    if cache.scales is None:
        return [*found, None, None]
    scales = cache.scales.tensors
    return [*found, *(_descriptor(t, tokens // rows, rows, rows, (1, rows), 0) for t in scales)]


@lru_cache(maxsize=MOST_DESCRIPTORS)
def _shape(
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    has_window: bool,
    cap: float,
    most_requests: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> HopperShape:
    """The constants of a launch; made once, as its parts are slow to make."""
    return HopperShape(
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=has_window,
        CAP=cap,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        QUERY_STAGES=1 if cache_dtype.itemsize == 1 else QUERY_STAGES,
        MOST_REQUESTS=most_requests,
        MOST_LISTED=MOST_LISTED,
        NO_TILE=NO_TILE,
        CACHED_TOKENS=CACHED_BYTES // (2 * head_dim * cache_dtype.itemsize),
        DTYPE=_GL_TYPES[dtype],
        CACHE_DTYPE=_GL_TYPES[cache_dtype],
    )


def hopper_attention(
    q: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    scoring: Scoring,
    output: AttentionOutput,
    listed: TileList | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``prefill_attention_triton``, for what :func:`serves` accepts."""
    num_tokens, num_heads, head_dim = q.shape
    block_tables, seq_lens, _, query_start, max_query_len = sequences
    out, out_scales, _ = output
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    requests = seq_lens.shape[0]
    entries = triton.cdiv(num_tokens, BLOCK_M) + requests if listed is None else len(listed.tiles)
    if not num_tokens or not min(entries, requests, max_query_len):
        return out
    if arrivals is None or arrivals.numel() < 2:
        arrivals = torch.zeros(2, dtype=torch.int32, device=q.device)
    factor, cap = score_factors(scoring.scale, scoring.softcap)
    shape = _shape(
        *(num_heads // cache.num_kv_heads, cache.num_kv_heads, head_dim, cache.block_size),
        *(scoring.window > 0, cap, next(most for most in MOST_REQUESTS if listed or most >= requests)),
        *(q.dtype, cache.keys.dtype),
    )
    hopper_attention_kernel[(min(num_heads * entries, multiprocessors(q.device)),)](
        _descriptor(q, num_tokens, num_heads * head_dim, q.stride(0), (64, 64), 128),
        *cache_descriptors(cache),
        *(q, block_tables, query_start, seq_lens, None if listed is None else listed.tiles, arrivals),
        *(out, *end_pointers(out_scales), num_heads, requests, entries, block_tables.stride(0)),
        factor,
        scoring.window,
        **end_constants(out_scales, num_heads * head_dim),
        SHAPE=shape,
        num_warps=4,
    )
    return out
