"""What one step of the product of many rows with packed weights reads, and what is asked for ahead of it.

Owns the loads of x and of the scales and zeros of groups, the prefetches into L2, and how unpacked parts
come to stand side by side. Knows no product.

    x = read_tokens(x_source, stride, first, tokens, column, K, BLOCK_T, COLUMNS, MASKED, TMA)
"""

from __future__ import annotations

# mypy: disable-error-code="assignment"
# (Tuples grow in jitted loops.)
import triton
import triton.language as tl

from ingot.kernels.overlap import LINE_BYTES, prefetch_lines


@triton.jit
def read_tokens(
    source: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    tokens: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
) -> tl.tensor:
    """COLUMNS columns of the rows of x from ``first`` on: [BLOCK, COLUMNS], zeros beyond."""
    if TMA:
        x = source.load([first, column])
    else:
        token, cols = first + tl.arange(0, BLOCK), column + tl.arange(0, COLUMNS)
        inside = (token < tokens)[:, None]
        if MASKED:
            inside = inside & (cols < K)[None, :]
        x = tl.load(source + token[:, None].to(tl.int64) * stride + cols[None, :], mask=inside, other=0.0)
    return x


@triton.jit
def of_groups(
    ptr: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """The numbers of each row for GROUPS spans of SPAN columns from ``column`` on; the last past the end."""
    found = ()
    for group in tl.static_range(GROUPS):
        place = tl.minimum((column + group * SPAN) // GROUP, (K - 1) // GROUP)
        found = found + (tl.load(ptr + place * stride + rows),)  # noqa: RUF005
    return found


@triton.jit
def ask_numbers(
    ptr: tl.tensor,
    stride: tl.tensor,
    start: tl.tensor,
    column: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Ask for the numbers of BLOCK_N rows for the group of ``column`` to come into L2."""
    LINE: tl.constexpr = LINE_BYTES // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (BLOCK_N + LINE - 1) // LINE
    rows = start + tl.arange(0, LINES) * LINE
    prefetch_lines(ptr + tl.minimum(column // GROUP, (K - 1) // GROUP) * stride + rows, rows < N)


@triton.jit
def ask_words(
    ptr: tl.tensor,
    stride: tl.tensor,
    start: tl.tensor,
    chunk: tl.tensor,
    wanted: tl.tensor,
    N: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Ask for the words of BLOCK_N rows, a multiple of 16, in a chunk to come into L2, if they are wanted."""
    LINE: tl.constexpr = LINE_BYTES // 2
    LINES: tl.constexpr = 16 * PART // LINE  # of 16 rows: one after another
    line = tl.arange(0, BLOCK_N // 16 * LINES)
    row = start + line // LINES * 16
    place = ptr + row.to(tl.int64) * stride + chunk * (16 * PART) + line % LINES * LINE
    prefetch_lines(place, (row < N) & wanted)


@triton.jit
def _pair(left: tl.tensor, right: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    apart: tl.constexpr = (left.shape[0], CHUNKS, left.shape[1] // CHUNKS)
    both = tl.permute(tl.join(tl.reshape(left, apart), tl.reshape(right, apart)), (0, 1, 3, 2))
    return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def side_by_side(tiles: tl.tensor, COUNT: tl.constexpr, CHUNKS: tl.constexpr = 1) -> tl.tensor:
    """Two or four tiles of columns as one, chunk by chunk. Nothing moves: they lie in the registers of the
    same threads.
    """
    wide = _pair(tiles[0], tiles[1], CHUNKS)
    if COUNT == 4:
        wide = _pair(wide, _pair(tiles[2], tiles[3], CHUNKS), CHUNKS)
    return wide
