"""The product of up to 16 rows with weights of 8 or 4 bits, loaded straight into the tensor cores' registers.

Owns the loop: each warp takes chunks of columns of its own, a few chunks ahead in registers, and multiplies
them without shared memory and without waiting for other warps; their sums meet at the end. The layout is
stored_weight.py's, whose blocks of 16 rows are in the order of the operand, and numbers are multiplied as
fragment_numbers.py raises them: what is too much is their excess times the sum of x, and that is a product
with ones. Knows no epilogue. (Triton knows sums of tuples, no stars in them.)

    acc = fragment_tile(x_ptr, ...)  # [BLOCK_N, BLOCK_T] fp32, rows as ``row_order`` has them
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
# (Tuples grow in jitted loops.)
import triton
import triton.language as tl

from ingot.kernels.fragment_numbers import excess, lift, raised
from ingot.kernels.overlap import start_next, wait_for_previous


@triton.jit
def row_order(ROWS: tl.constexpr, FRAGMENTS: tl.constexpr) -> tl.tensor:
    """Which row each of ROWS rows of a tile is: of 16 in an operand's order, first the even ones."""
    lane = tl.arange(0, ROWS)
    return lane // 16 * 16 + lane % 8 * 2 + lane // 8 % 2 if FRAGMENTS > 0 else lane


@triton.jit
def _halves(pairs: tl.tensor) -> tl.tensor:
    """The two 16-bit halves of every 32-bit number, side by side in a last dimension."""
    return tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))


@triton.jit
def _words(loaded: tl.tensor, BLOCKS: tl.constexpr, WARPS: tl.constexpr, QUARTERS: tl.constexpr) -> tl.tensor:
    """What ``_load_words`` loads as the left operand: [WARPS, 16 BLOCKS, 16 QUARTERS] int16."""
    words = tl.reshape(_halves(loaded), (QUARTERS, BLOCKS, WARPS, 8, 4, 2, 2, 2))
    words = tl.permute(words, (2, 1, 5, 3, 0, 4, 6, 7))
    return tl.reshape(words, (WARPS, 16 * BLOCKS, 16 * QUARTERS))


@triton.jit
def _columns(
    loaded: tl.tensor,
    DTYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    QUARTERS: tl.constexpr,
) -> tl.tensor:
    """What ``_load_rows`` loads as the right operand: [WARPS, 16 QUARTERS, TOKENS]."""
    x = tl.reshape(
        _halves(loaded).to(DTYPE, bitcast=True), (TOKENS // 8, QUARTERS // 2, WARPS, 8, 4, 2, 2, 2)
    )
    return tl.reshape(tl.permute(x, (2, 1, 5, 4, 6, 7, 0, 3)), (WARPS, 16 * QUARTERS, TOKENS))


@triton.jit
def _beside(loaded: tl.tensor, BLOCKS: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tensor:
    """Two numbers a thread, of rows 2 g and 2 g + 1, as they stand beside sums: fp32 [.., 1, 4, 1]."""
    beside = tl.permute(tl.reshape(loaded, (BLOCKS, WARPS, 8, 4, 2)), (1, 0, 4, 2, 3))
    return tl.reshape(beside, (WARPS, 16 * BLOCKS, 1, 4, 1)).to(tl.float32)


@triton.jit
def _apart(sums: tl.tensor, BLOCKS: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tensor:
    """Sums [WARPS, 16 BLOCKS, TOKENS] with the threads of a row in a dimension of their own."""
    return tl.reshape(sums, (WARPS, 16 * BLOCKS, TOKENS // 8, 4, 2))


@triton.jit
def _for_all(sums: tl.tensor, BLOCKS: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tensor:
    """Sums of x, in 16 equal rows, for all rows."""
    whole = tl.broadcast_to(tl.reshape(sums, (WARPS, 1, 16, TOKENS)), (WARPS, BLOCKS, 16, TOKENS))
    return tl.reshape(whole, (WARPS, 16 * BLOCKS, TOKENS))


@triton.jit
def _add_part(
    low: tl.tensor,
    high: tl.tensor,
    x_low: tl.tensor,
    x_high: tl.tensor,
    words: tl.tensor,
    x: tl.tensor,
    ones: tl.tensor,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """The sums of raised numbers and of x, with a part's added; ``high``: of numbers that are lifted, or of
    the upper halves of 8 bits.
    """
    if BITS == 8 and tl.bfloat16 == DTYPE:
        low = tl.dot(raised(words, 2 * PART, 4, DTYPE, ASM), x, low)
        high = tl.dot(raised(words, 2 * PART + 1, 4, DTYPE, ASM), x, high)
        x_low = tl.dot(ones, x, x_low)
    elif lift(PART, BITS, DTYPE) == 1.0:
        low = tl.dot(raised(words, PART, BITS, DTYPE, ASM), x, low)
        x_low = tl.dot(ones, x, x_low)
    else:
        high = tl.dot(raised(words, PART, BITS, DTYPE, ASM), x, high)
        x_high = tl.dot(ones, x, x_high)
    return low, high, x_low, x_high


@triton.jit
def _of_numbers(
    low: tl.tensor,
    high: tl.tensor,
    x_low: tl.tensor,
    x_high: tl.tensor,
    zero: tl.tensor,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The sums of numbers less their zeros, from those of raised numbers: [.., TOKENS / 8, 4, 2]."""
    EXCESS: tl.constexpr = excess(BITS, DTYPE)
    if BITS == 8 and tl.bfloat16 == DTYPE:
        total, too_much, whole = low + 16.0 * high, 17.0 * EXCESS * x_low, x_low
    elif BITS == 4 and tl.float16 == DTYPE:
        total, too_much, whole = low + 0.0625 * high, EXCESS * x_low + EXCESS / 16 * x_high, x_low + x_high
    else:
        total, too_much, whole = low, EXCESS * x_low, x_low
    total = _apart(total - _for_all(too_much, BLOCKS, WARPS, TOKENS), BLOCKS, WARPS, TOKENS)
    return total - zero * _apart(_for_all(whole, BLOCKS, WARPS, TOKENS), BLOCKS, WARPS, TOKENS)


@triton.jit
def _load_words(
    places: tl.tensor,
    warp: tl.tensor,
    chunk: tl.tensor,
    end: tl.tensor,
    WORDS: tl.constexpr,
) -> tl.tensor:
    """A chunk of every warp; zeros, and no traffic, from chunk ``end`` on."""
    there = (warp + chunk < end)[:, None]
    return tl.load(places + chunk * WORDS, mask=there, other=0, eviction_policy="evict_first")


@triton.jit
def _load_rows(
    places: tl.tensor,
    column: tl.tensor,
    real: tl.tensor,
    chunk: tl.tensor,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """The columns of x of a chunk of every warp, by parts; zeros from column K on."""
    PART: tl.constexpr = CHUNK // PARTS
    loaded = ()
    for part in tl.static_range(PARTS):
        here = chunk * CHUNK + part * PART
        there = real[:, None]
        if K % CHUNK != 0:
            there = (real & (column + here < K))[:, None]
        loaded = loaded + (tl.load(places + here // 2, mask=there, other=0),)  # noqa: RUF005
    return loaded


@triton.jit
def _load_beside(
    base: tl.tensor,
    row_pairs: tl.tensor,
    warp: tl.tensor,
    chunk: tl.tensor,
    end: tl.tensor,
    pair_stride: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> tl.tensor:
    """Scales or zeros of a chunk of every warp, two rows' in one number, by groups of columns."""
    loaded = ()
    for segment in tl.static_range(SEGMENTS):
        column = (warp + chunk) * CHUNK + segment * (CHUNK // SEGMENTS)
        group = tl.minimum(column // GROUP, (K - 1) // GROUP)
        pairs = tl.load(base + group * pair_stride + row_pairs, mask=warp + chunk < end, other=0)
        loaded = loaded + (pairs,)  # noqa: RUF005
    return loaded


@triton.jit
def fragment_tile(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    scale_ptr: tl.tensor,
    scale_stride: tl.tensor,
    zero_ptr: tl.tensor,
    block: tl.tensor,
    first: tl.tensor,
    steps: tl.tensor,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    GAP: tl.constexpr,
    LAST: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Rows of the weight times each row of x, over ``steps`` chunks of BLOCK_K columns from chunk ``first``.

    The rows are BLOCK_N / 16 blocks of 16: RUN neighbouring ones from ``block`` on, then as many GAP blocks
    further; none beyond block LAST. DEPTH chunks of every warp are asked for before the wait for the previous
    kernel, and stay ahead.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = 16 // BITS
    QUARTERS: tl.constexpr = BLOCK_K // PARTS // 16
    BLOCKS: tl.constexpr = BLOCK_N // 16
    WORDS: tl.constexpr = 128 * QUARTERS  # of 32 bits, in 16 rows of a chunk
    # Parts of a chunk that share scales; within one the sums may run on.
    SEGMENTS: tl.constexpr = BLOCK_K // GROUP if GROUP > 0 and GROUP < BLOCK_K else 1
    EACH: tl.constexpr = PARTS // SEGMENTS
    APART: tl.constexpr = BITS == 4  # sums are freed of their excess in every chunk
    GROUPED: tl.constexpr = GROUP > 0
    end = first + steps
    # Threads as the operands have them: 8 groups of 4 in a warp.
    index = tl.arange(0, 32 * WARPS * BLOCKS * QUARTERS)
    lane, warp = index % 32, index // 32 % WARPS
    number, quarter = index // (32 * WARPS) % BLOCKS, index // (32 * WARPS * BLOCKS)
    blocks = tl.minimum(block + number % RUN + number // RUN * GAP, LAST).to(tl.int64)
    places = blocks * (weight_stride * 8) + warp * WORDS + quarter * 128 + lane * 4
    places = weight_ptr.to(tl.pointer_type(tl.int32)) + places[:, None] + tl.arange(0, 4)[None, :]
    of_x = tl.arange(0, 2 * BLOCK_T * WARPS * QUARTERS)
    token = of_x // (16 * WARPS * QUARTERS) * 8 + of_x // 4 % 8
    column = of_x // 32 % WARPS * BLOCK_K + of_x // (32 * WARPS) % (QUARTERS // 2) * 32 + of_x % 4 * 8
    real = token < tokens
    x_places = (token * x_stride + column)[:, None] // 2 + tl.arange(0, 4)[None, :]
    x_places = x_ptr.to(tl.pointer_type(tl.int32)) + x_places
    beside = tl.arange(0, 32 * WARPS * BLOCKS)
    own, number = beside // 32 % WARPS, beside // (32 * WARPS)
    row_pairs = tl.minimum(block + number % RUN + number // RUN * GAP, LAST) * 8 + beside % 32 // 4
    scale_pairs = scale_ptr.to(tl.pointer_type(tl.int32))

    ahead, scales, zeros = (), (), ()
    for depth in tl.static_range(DEPTH):
        chunk = first + depth * WARPS
        ahead = ahead + (_load_words(places, warp, chunk, end, WORDS),)  # noqa: RUF005
        if GROUPED:
            scales = scales + _load_beside(scale_pairs, row_pairs, own, chunk, end, scale_stride // 2,
                                           K, GROUP, BLOCK_K, SEGMENTS)  # fmt: skip
            if zero_ptr is not None:
                zeros = zeros + _load_beside(zero_ptr.to(tl.pointer_type(tl.int16)), row_pairs, own, chunk,
                                             end, scale_stride // 2, K, GROUP, BLOCK_K, SEGMENTS)  # fmt: skip
    zero = tl.full((WARPS, BLOCK_N, 1, 4, 1), 1 << (BITS - 1), dtype=tl.float32)
    if zero_ptr is not None and not GROUPED:
        pair = tl.load(zero_ptr.to(tl.pointer_type(tl.int16)) + row_pairs)
        zero = _beside(tl.join(pair & 255, (pair >> 8) & 255), BLOCKS, WARPS, BLOCK_T)
    if OVERLAP == 4:
        start_next(OVERLAP)
    wait_for_previous(OVERLAP)

    ones = tl.full((WARPS, 16, 16 * QUARTERS), 1.0, dtype=tl.float32).to(DTYPE)
    nothing = tl.zeros((WARPS, BLOCK_N, BLOCK_T), dtype=tl.float32)
    none = tl.zeros((WARPS, 16, BLOCK_T), dtype=tl.float32)
    acc, low, high, x_low, x_high = nothing, nothing, nothing, none, none
    for step in tl.range(0, tl.cdiv(steps, WARPS), num_stages=1, loop_unroll_factor=DEPTH):
        chunk = first + step * WARPS
        rows = _load_rows(
            x_places, column, real & (of_x // 32 % WARPS + chunk < end), chunk, K, BLOCK_K, PARTS
        )
        words = _words(ahead[0], BLOCKS, WARPS, QUARTERS)
        ahead = ahead[1:]
        for segment in tl.static_range(SEGMENTS):
            if APART:
                low, high, x_low, x_high = nothing, nothing, none, none
            for part in tl.static_range(EACH):
                x = _columns(rows[segment * EACH + part], DTYPE, BLOCK_T, WARPS, QUARTERS)
                low, high, x_low, x_high = _add_part(low, high, x_low, x_high, words, x, ones,
                                                     segment * EACH + part, BITS, DTYPE, ASM)  # fmt: skip
            if APART:
                if GROUPED and zero_ptr is not None:
                    zero = _beside(tl.join(zeros[0] & 255, (zeros[0] >> 8) & 255), BLOCKS, WARPS, BLOCK_T)
                    zeros = zeros[1:]
                sums = _of_numbers(low, high, x_low, x_high, zero, BLOCKS, WARPS, BLOCK_T, BITS, DTYPE)
                if GROUPED:
                    scale = _halves(scales[0]).to(DTYPE, bitcast=True)
                    sums = sums * _beside(scale, BLOCKS, WARPS, BLOCK_T)
                    scales = scales[1:]
                acc += tl.reshape(sums, (WARPS, BLOCK_N, BLOCK_T))
        then = chunk + DEPTH * WARPS
        ahead = ahead + (_load_words(places, warp, then, end, WORDS),)  # noqa: RUF005
        if GROUPED:
            scales = scales + _load_beside(scale_pairs, row_pairs, own, then, end, scale_stride // 2,
                                           K, GROUP, BLOCK_K, SEGMENTS)  # fmt: skip
            if zero_ptr is not None:
                zeros = zeros + _load_beside(zero_ptr.to(tl.pointer_type(tl.int16)), row_pairs, own, then,
                                             end, scale_stride // 2, K, GROUP, BLOCK_K, SEGMENTS)  # fmt: skip
    if not APART:
        sums = _of_numbers(low, high, x_low, x_high, zero, BLOCKS, WARPS, BLOCK_T, BITS, DTYPE)
        acc = tl.reshape(sums, (WARPS, BLOCK_N, BLOCK_T))
    y = tl.sum(acc, axis=0)
    if not GROUPED:
        lanes = row_order(BLOCK_N, 1)
        of_tile = tl.minimum(block + lanes // 16 % RUN + lanes // 16 // RUN * GAP, LAST) * 16 + lanes % 16
        y *= tl.load(scale_ptr + of_tile).to(tl.float32)[:, None]
    return y
