"""The product of up to 16 rows with weights of 8 bits in registers, each chunk loaded at its step.

As fragment_loop.py, but with nothing on its way while a warp multiplies: fewer registers allow more programs
at once, which is faster for most shapes.

    acc = fragment_step_tile(x, weight, block, first, end, TILE, LOOP)  # [BLOCK_N, BLOCK_T] by ``row_order``
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
# (Tuples grow in jitted loops.)
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.launch_overlap import wait_for_previous
from ingot.kernels.product.few_rows.fragment_loop import apart, halves, row_order
from ingot.kernels.product.few_rows.fragment_values import centre, excess, raised
from ingot.kernels.product.product_arguments import InputRows, Weight


@triton.jit
def _words(loaded: tensor, BLOCKS: constexpr, WARPS: constexpr, QUARTERS: constexpr) -> tensor:
    """What ``_chunk_of_words`` loads, as the left operand: [WARPS, 16 BLOCKS, 16 QUARTERS] int16."""
    words = tl.reshape(halves(loaded), (QUARTERS, BLOCKS, WARPS, 8, 4, 2, 2, 2))
    words = tl.permute(words, (2, 1, 5, 3, 0, 4, 6, 7))
    return tl.reshape(words, (WARPS, 16 * BLOCKS, 16 * QUARTERS))


@triton.jit
def _columns(
    loaded: tensor, DTYPE: constexpr, TOKENS: constexpr, WARPS: constexpr, QUARTERS: constexpr
) -> tensor:
    """What ``_chunk_of_rows`` loads, as the right operand: [WARPS, 16 QUARTERS, TOKENS]."""
    x = tl.reshape(halves(loaded).to(DTYPE, bitcast=True), (TOKENS // 8, QUARTERS // 2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(x, (2, 1, 5, 4, 6, 7, 0, 3)), (WARPS, 16 * QUARTERS, TOKENS))


@triton.jit
def _beside(loaded: tensor, BLOCKS: constexpr, WARPS: constexpr) -> tensor:
    """Two values per thread, of rows 2 g and 2 g + 1, in the layout of sums: fp32 [.., 1, 4, 1]."""
    beside = tl.permute(tl.reshape(loaded, (BLOCKS, WARPS, 8, 4, 2)), (1, 0, 4, 2, 3))
    return tl.reshape(beside, (WARPS, 16 * BLOCKS, 1, 4, 1)).to(tl.float32)


@triton.jit
def _for_all(sums: tensor, BLOCKS: constexpr, WARPS: constexpr, TOKENS: constexpr) -> tensor:
    """Sums of x, in 16 equal rows, for all rows."""
    whole = tl.broadcast_to(tl.reshape(sums, (WARPS, 1, 16, TOKENS)), (WARPS, BLOCKS, 16, TOKENS))
    return tl.reshape(whole, (WARPS, 16 * BLOCKS, TOKENS))


@triton.jit
def _add_part(
    sums: tensor, words: tensor, x: tensor, ones: tensor, PART: constexpr, OF_X: constexpr, LOOP: constexpr
) -> tensor:
    """Add a part to the sums of raised values and, with OF_X, of x."""
    total, of_x = sums
    total = tl.dot(raised(words, PART, LOOP.BITS, x.dtype, LOOP.ASM), x, total)
    if OF_X:
        of_x = tl.dot(ones, x, of_x)
    return total, of_x


@triton.jit
def _of_values(sums: tensor, zero: tensor, DTYPE: constexpr, OF_X: constexpr, LOOP: constexpr) -> tensor:
    """The sums of values less their zeros, from those of raised values: [.., TOKENS / 8, 4, 2]."""
    total, of_x = sums
    BITS: constexpr = LOOP.BITS
    TOKENS: constexpr = LOOP.BLOCK_T
    BLOCKS: constexpr = LOOP.BLOCK_N // 16
    WARPS: constexpr = LOOP.WARPS
    EXCESS: constexpr = excess(BITS, DTYPE)
    if OF_X:
        too_much, whole = EXCESS * of_x, of_x
        total = apart(total - _for_all(too_much, BLOCKS, WARPS, TOKENS), BLOCKS, WARPS, TOKENS)
        whole = apart(_for_all(whole, BLOCKS, WARPS, TOKENS), BLOCKS, WARPS, TOKENS)
        total -= (zero - centre(BITS, DTYPE)) * whole
    else:
        total = apart(total, BLOCKS, WARPS, TOKENS)
    return total


@triton.jit
def _chunk_of_rows(x: InputRows, chunk: tensor, end: tensor, LOOP: constexpr) -> tensor:
    """The columns of x of every warp's chunk, from ``chunk`` on, before ``end`` and K, by parts."""
    WARPS: constexpr = LOOP.WARPS
    BLOCK_K: constexpr = LOOP.BLOCK_K
    PARTS: constexpr = 16 // LOOP.BITS
    QUARTERS: constexpr = BLOCK_K // PARTS // 16
    PART: constexpr = BLOCK_K // PARTS
    index = tl.arange(0, 2 * LOOP.BLOCK_T * WARPS * QUARTERS)
    token, warp = index // (16 * WARPS * QUARTERS) * 8 + index // 4 % 8, index // 32 % WARPS
    column = warp * BLOCK_K + index // (32 * WARPS) % (QUARTERS // 2) * 32 + index % 4 * 8
    places = (token * x.stride + column)[:, None] // 2 + tl.arange(0, 4)[None, :]
    places = x.ptr.to(tl.pointer_type(tl.int32)) + places
    real = (token < x.tokens) & (warp + chunk < end)
    loaded = ()
    for part in tl.static_range(PARTS):
        here = chunk * BLOCK_K + part * PART
        there = real[:, None]
        if LOOP.K % BLOCK_K != 0:
            there = (real & (column + here < LOOP.K))[:, None]
        loaded = loaded + (tl.load(places + here // 2, mask=there, other=0),)  # noqa: RUF005
    return loaded


@triton.jit
def _run_of(block: tensor, TILE: constexpr) -> tensor:
    """The block of 16 rows of each of a tile's blocks, counted from its first."""
    return block % TILE[0] + block // TILE[0] * TILE[1]


@triton.jit
def _chunk_of_words(
    weight: Weight, block: tensor, chunk: tensor, end: tensor, TILE: constexpr, LOOP: constexpr
) -> tensor:
    """The words of every warp's chunk, from ``chunk`` on, of the tile from ``block`` on; zeros without
    traffic from ``end`` on, or past the last block of rows.
    """
    WARPS: constexpr = LOOP.WARPS
    QUARTERS: constexpr = LOOP.BLOCK_K * LOOP.BITS // 256
    BLOCKS: constexpr = LOOP.BLOCK_N // 16
    WORDS: constexpr = 128 * QUARTERS  # of 32 bits, in 16 rows of a chunk
    index = tl.arange(0, 32 * WARPS * BLOCKS * QUARTERS)
    warp, number = index // 32 % WARPS, _run_of(index // (32 * WARPS) % BLOCKS, TILE)
    place = index // (32 * WARPS * BLOCKS) * 128 + index % 32 * 4
    place += number * (weight.stride * 8) + warp * WORDS
    here = weight.ptr.to(tl.pointer_type(tl.int32)) + block.to(tl.int64) * (weight.stride * 8) + chunk * WORDS
    there = (warp + chunk < end) & (block + number <= TILE[2])
    places = here + (place[:, None] + tl.arange(0, 4)[None, :])
    return tl.load(places, mask=there[:, None], other=0, eviction_policy="evict_first")


@triton.jit
def fragment_step_tile(
    x: InputRows, weight: Weight, block: tensor, first: tensor, end: tensor, TILE: constexpr, LOOP: constexpr
) -> tensor:
    """Rows of the weight times each row of x, over chunks ``first`` to ``end`` of BLOCK_K columns.

    TILE (RUN, GAP, LAST) says which rows, in blocks of 16: RUN neighbours from ``block`` on, then as many GAP
    blocks further, none past block LAST.

    A warp loads a chunk at its step, with the rows of x, the first before the wait for the previous kernel.
    """
    DTYPE: constexpr = x.ptr.dtype.element_ty
    BITS: constexpr = LOOP.BITS
    BLOCK_T: constexpr = LOOP.BLOCK_T
    BLOCK_N: constexpr = LOOP.BLOCK_N
    BLOCK_K: constexpr = LOOP.BLOCK_K
    WARPS: constexpr = LOOP.WARPS
    PARTS: constexpr = 16 // BITS
    QUARTERS: constexpr = BLOCK_K // PARTS // 16
    BLOCKS: constexpr = BLOCK_N // 16
    OF_X: constexpr = weight.zeros is not None or centre(BITS, DTYPE) == 0
    zero = tl.full((WARPS, BLOCK_N, 1, 4, 1), 1 << (BITS - 1), dtype=tl.float32)
    # Loaded before the sums, so that nothing waits for them after.
    lanes = row_order(BLOCK_N)
    own = block + _run_of(lanes // 16, TILE)
    row_scales = tl.load(weight.scales + tl.minimum(own, TILE[2]) * 16 + lanes % 16).to(tl.float32)
    if weight.zeros is not None:
        beside = tl.arange(0, 32 * WARPS * BLOCKS)
        number = beside // (32 * WARPS)
        own = tl.minimum(block + _run_of(number, TILE), TILE[2])
        pair = tl.load(weight.zeros.to(tl.pointer_type(tl.int16)) + own * 8 + beside % 32 // 4)
        zero = _beside(tl.join(pair & 255, (pair >> 8) & 255), BLOCKS, WARPS)
    ones = tl.full((WARPS, 16, 16 * QUARTERS), 1.0, dtype=tl.float32).to(DTYPE)
    nothing = tl.zeros((WARPS, BLOCK_N, BLOCK_T), dtype=tl.float32)
    none = tl.zeros((WARPS, 16, BLOCK_T), dtype=tl.float32)
    acc = nothing
    for step in tl.range(0, tl.cdiv(end - first, WARPS), num_stages=1, loop_unroll_factor=1):
        chunk = first + step * WARPS
        words = _chunk_of_words(weight, block, chunk, end, TILE, LOOP)
        if step == 0:
            wait_for_previous(LOOP.OVERLAP)
            rows = _chunk_of_rows(x, chunk, end, LOOP)
        else:  # in a branch: otherwise the compiler would load some of them only at their use, and wait
            rows = _chunk_of_rows(x, chunk, end, LOOP)
        operand = _words(words, BLOCKS, WARPS, QUARTERS)
        # The excess is subtracted in every chunk: it is a thousand times the values, and that of all columns
        # would leave little of a sum in fp32, if a row has one sign.
        sums = (nothing, none)
        for part in tl.static_range(PARTS):
            columns = _columns(rows[part], DTYPE, BLOCK_T, WARPS, QUARTERS)
            sums = _add_part(sums, operand, columns, ones, part, OF_X, LOOP)
        acc += tl.reshape(_of_values(sums, zero, DTYPE, OF_X, LOOP), (WARPS, BLOCK_N, BLOCK_T))
    y = tl.sum(acc, axis=0)
    return y * row_scales[:, None]
