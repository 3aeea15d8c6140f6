"""Index arithmetic of attention kernels: where consecutive tokens lie in the paged cache; splits.

rows = tile_rows(table_ptr, start, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_rows(
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Element offsets [BLOCK_N] int64 of tokens start, start + 1, …; start < ``end`` is a multiple of
    BLOCK_N.

    A tile inside one block reads one table entry, a tile over several blocks one per token before ``end``.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        return block * block_stride + (start % BLOCK_SIZE + tl.arange(0, BLOCK_N)).to(tl.int64) * token_stride
    tokens = start + tl.arange(0, BLOCK_N)
    block = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < end, other=0).to(tl.int64)
    return block * block_stride + (tokens % BLOCK_SIZE).to(tl.int64) * token_stride


@triton.jit
def tile_place(
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """The tile's element offset, int64, and its channels' offsets [BLOCK_N, BLOCK_D] from there.

    A tile inside one block has the same 32-bit offsets wherever it lies, so a loop over tiles keeps them.
    """
    cols = tl.arange(0, BLOCK_D)[None, :]
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        place = block * block_stride + (start % BLOCK_SIZE) * token_stride
        offsets = (tl.arange(0, BLOCK_N) * token_stride)[:, None] + cols
    else:
        rows = tile_rows(table_ptr, start, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
        place = 0
        offsets = rows[:, None] + cols
    return place, offsets


@triton.jit
def held_rows(
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """As :func:`tile_rows`, but tokens past ``end`` stand for the last one, and ``start`` may be past it.

    Reading the last token again costs no memory traffic, and loads need no mask. A tile that starts at
    ``end`` or later reads nothing from the table; its offsets must not be followed.
    """
    tokens = tl.minimum(start + tl.arange(0, BLOCK_N), end - 1)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0).to(tl.int64)
        return block * block_stride + (tokens % BLOCK_SIZE).to(tl.int64) * token_stride
    block = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=start < end, other=0).to(tl.int64)
    return block * block_stride + (tokens % BLOCK_SIZE).to(tl.int64) * token_stride


@triton.jit
def split_bounds(
    seq_len: tl.tensor,
    window: tl.tensor,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """First visible key, tile-aligned start of the first split, tokens per split."""
    first = seq_len * 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0)
    base = first // BLOCK_N * BLOCK_N
    share = tl.cdiv(seq_len - base, MAX_SPLITS)
    return first, base, tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, MIN_TOKENS)
