"""Steps of the products of many rows with packed weights: loads, prefetches into L2, and the epilogue.

x = read_tokens(x_source, stride, first, tokens, column, COLUMNS, LOOP)
"""

from __future__ import annotations

# mypy: disable-error-code="assignment"
# (Tuples grow in jitted loops.)
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.launch_overlap import LINE_BYTES, prefetch_lines
from ingot.kernels.product.product_arguments import Weight


@triton.jit
def read_tokens(
    source: tensor,
    stride: tensor,
    first: tensor,
    tokens: tensor,
    column: tensor,
    COLUMNS: constexpr,
    LOOP: constexpr,
) -> tensor:
    """COLUMNS columns of the rows of x from ``first`` on: [BLOCK_T, COLUMNS], zeros past the end."""
    if LOOP.TMA:
        x = source.load([first, column])
    else:
        token, cols = first + tl.arange(0, LOOP.BLOCK_T), column + tl.arange(0, COLUMNS)
        inside = (token < tokens)[:, None]
        if LOOP.K % LOOP.BLOCK_K != 0:
            inside = inside & (cols < LOOP.K)[None, :]
        x = tl.load(source + token[:, None].to(tl.int64) * stride + cols[None, :], mask=inside, other=0.0)
    return x


@triton.jit
def of_groups(ptr: tensor, stride: tensor, rows: tensor, column: tensor, LOOP: constexpr) -> tensor:
    """Scales or zeros of each row for the groups of a step from ``column`` on, at most the last group."""
    GROUPS: constexpr = LOOP.BLOCK_K // LOOP.GROUP if LOOP.GROUP < LOOP.BLOCK_K else 1
    found = ()
    for group in tl.static_range(GROUPS):
        place = (column + group * (LOOP.BLOCK_K // GROUPS)) // LOOP.GROUP
        place = tl.minimum(place, (LOOP.K - 1) // LOOP.GROUP)
        found = found + (tl.load(ptr + place * stride + rows),)  # noqa: RUF005
    return found


@triton.jit
def ask_beside(ptr: tensor, stride: tensor, start: tensor, column: tensor, LOOP: constexpr) -> None:
    """Prefetch into L2 the scales or zeros of BLOCK_N rows for the group of ``column``."""
    LINE: constexpr = LINE_BYTES // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    LINES: constexpr = (LOOP.BLOCK_N + LINE - 1) // LINE
    rows = start + tl.arange(0, LINES) * LINE
    group = tl.minimum(column // LOOP.GROUP, (LOOP.K - 1) // LOOP.GROUP)
    prefetch_lines(ptr + group * stride + rows, rows < LOOP.N)


@triton.jit
def ask_words(
    weight: Weight, start: tensor, chunk: tensor, wanted: tensor, PART: constexpr, LOOP: constexpr
) -> None:
    """Prefetch into L2 a chunk's words of BLOCK_N rows, a multiple of 16, if they are wanted."""
    LINE: constexpr = LINE_BYTES // 2
    LINES: constexpr = 16 * PART // LINE  # of 16 rows: one after another
    line = tl.arange(0, LOOP.BLOCK_N // 16 * LINES)
    row = start + line // LINES * 16
    place = weight.ptr + row.to(tl.int64) * weight.stride + chunk * (16 * PART) + line % LINES * LINE
    prefetch_lines(place, (row < LOOP.N) & wanted)


@triton.jit
def _pair(left: tensor, right: tensor, CHUNKS: constexpr) -> tensor:
    apart: constexpr = (left.shape[0], CHUNKS, left.shape[1] // CHUNKS)
    both = tl.permute(tl.join(tl.reshape(left, apart), tl.reshape(right, apart)), (0, 1, 3, 2))
    return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def side_by_side(tiles: tensor, COUNT: constexpr, CHUNKS: constexpr = 1) -> tensor:
    """Two or four tiles of columns as one, chunk by chunk, all in the registers of the same threads."""
    wide = _pair(tiles[0], tiles[1], CHUNKS)
    if COUNT == 4:
        wide = _pair(wide, _pair(tiles[2], tiles[3], CHUNKS), CHUNKS)
    return wide


@triton.jit
def store_packed(
    acc: tensor,
    rows: tensor,
    own: tensor,
    first_token: tensor,
    split: tensor,
    tokens: tensor,
    weight: Weight,
    bias_ptr: tensor,
    y_ptr: tensor,
    LOOP: constexpr,
) -> None:
    """Store sums of outputs ``rows`` in part ``split`` of y, with bias and, without groups, scales of
    ``own``.
    """
    if LOOP.GROUP == 0:
        acc *= tl.load(weight.scales + own).to(tl.float32)[:, None]
    token = first_token + tl.arange(0, LOOP.BLOCK_T)
    inside = (rows < LOOP.N)[:, None] & (token < tokens)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + own).to(tl.float32)[:, None]
    y_rows = split.to(tl.int64) * tokens + token
    tl.store(y_ptr + y_rows[None, :] * LOOP.N + rows[:, None], acc.to(y_ptr.dtype.element_ty), mask=inside)
