"""The product of up to 16 rows with weights of 8 or 4 bits, loaded straight into the tensor cores' registers.

Owns the loop: each warp takes chunks of columns of its own and multiplies them without shared memory and
without waiting for other warps; their sums meet at the end. The layout is stored_weight.py's, whose blocks of
16 rows are in the order of the operand, and numbers are multiplied as fragment_numbers.py raises them: what
is too much is their excess times the sum of x, and that is a product with ones. Knows no epilogue. (Triton
knows sums of tuples, no stars in them.)

    acc = fragment_tile(x_ptr, ...)  # [BLOCK_N, BLOCK_T] fp32, rows as ``row_order`` has them
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
# (Tuples grow in jitted loops.)
import triton
import triton.language as tl

from ingot.kernels.overlap import wait_for_previous
from ingot.kernels.product.fragment_numbers import centre, excess, lift, raised


@triton.jit
def row_order(ROWS: tl.constexpr) -> tl.tensor:
    """Which row each of ROWS rows of a tile is: of 16 in an operand's order, first the even ones."""
    lane = tl.arange(0, ROWS)
    return lane // 16 * 16 + lane % 8 * 2 + lane // 8 % 2


@triton.jit
def halves(pairs: tl.tensor) -> tl.tensor:
    """The two 16-bit halves of every 32-bit number, side by side in a last dimension."""
    return tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))


@triton.jit
def _words(loaded: tl.tensor, BLOCKS: tl.constexpr, WARPS: tl.constexpr, QUARTERS: tl.constexpr) -> tl.tensor:
    """What ``chunk_of_words`` loads as the left operand: [WARPS, 16 BLOCKS, 16 QUARTERS] int16."""
    words = tl.reshape(halves(loaded), (QUARTERS, BLOCKS, WARPS, 8, 4, 2, 2, 2))
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
    """What ``chunk_of_rows`` loads as the right operand: [WARPS, 16 QUARTERS, TOKENS]."""
    x = tl.reshape(halves(loaded).to(DTYPE, bitcast=True), (TOKENS // 8, QUARTERS // 2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(x, (2, 1, 5, 4, 6, 7, 0, 3)), (WARPS, 16 * QUARTERS, TOKENS))


@triton.jit
def _beside(loaded: tl.tensor, BLOCKS: tl.constexpr, WARPS: tl.constexpr) -> tl.tensor:
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
    OF_X: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """The sums of raised numbers and, with OF_X, of x, with a part's added; ``high``: of numbers that are
    lifted, or of the upper halves of 8 bits.
    """
    if BITS == 8 and tl.bfloat16 == DTYPE:
        low = tl.dot(raised(words, 2 * PART, 4, DTYPE, ASM), x, low)
        high = tl.dot(raised(words, 2 * PART + 1, 4, DTYPE, ASM), x, high)
        x_low = tl.dot(ones, x, x_low)
    elif lift(PART, BITS, DTYPE) == 1.0:
        low = tl.dot(raised(words, PART, BITS, DTYPE, ASM), x, low)
        if OF_X:
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
    OF_X: tl.constexpr,
) -> tl.tensor:
    """The sums of numbers less their zeros, from those of raised numbers: [.., TOKENS / 8, 4, 2]."""
    EXCESS: tl.constexpr = excess(BITS, DTYPE)
    if BITS == 8 and tl.bfloat16 == DTYPE:
        total, too_much, whole = low + 16.0 * high, 17.0 * EXCESS * x_low, x_low
    elif BITS == 4 and tl.float16 == DTYPE:
        total, too_much, whole = low + 0.0625 * high, EXCESS * x_low + EXCESS / 16 * x_high, x_low + x_high
    else:
        total, too_much, whole = low, EXCESS * x_low, x_low
    if OF_X:
        total = _apart(total - _for_all(too_much, BLOCKS, WARPS, TOKENS), BLOCKS, WARPS, TOKENS)
        whole = _apart(_for_all(whole, BLOCKS, WARPS, TOKENS), BLOCKS, WARPS, TOKENS)
        total -= (zero - centre(BITS, DTYPE)) * whole
    else:
        total = _apart(total, BLOCKS, WARPS, TOKENS)
    return total


@triton.jit
def chunk_of_rows(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    chunk: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """The columns of x of one chunk of every warp, from ``chunk`` on and below ``end``, by parts; zeros from
    column K on.
    """
    PARTS: tl.constexpr = 16 // BITS
    QUARTERS: tl.constexpr = BLOCK_K // PARTS // 16
    PART: tl.constexpr = BLOCK_K // PARTS
    index = tl.arange(0, 2 * BLOCK_T * WARPS * QUARTERS)
    token, warp = index // (16 * WARPS * QUARTERS) * 8 + index // 4 % 8, index // 32 % WARPS
    column = warp * BLOCK_K + index // (32 * WARPS) % (QUARTERS // 2) * 32 + index % 4 * 8
    places = (token * x_stride + column)[:, None] // 2 + tl.arange(0, 4)[None, :]
    places = x_ptr.to(tl.pointer_type(tl.int32)) + places
    real = (token < tokens) & (warp + chunk < end)
    loaded = ()
    for part in tl.static_range(PARTS):
        here = chunk * BLOCK_K + part * PART
        there = real[:, None]
        if K % BLOCK_K != 0:
            there = (real & (column + here < K))[:, None]
        loaded = loaded + (tl.load(places + here // 2, mask=there, other=0),)  # noqa: RUF005
    return loaded


@triton.jit
def _threads(
    BLOCKS: tl.constexpr, WARPS: tl.constexpr, QUARTERS: tl.constexpr, RUN: tl.constexpr, GAP: tl.constexpr
) -> tl.tensor:
    """Of each thread's words: the warp, the block of 16 rows from the tile's first on, and their place in
    16 words of a lane.
    """
    index = tl.arange(0, 32 * WARPS * BLOCKS * QUARTERS)
    number, quarter = index // (32 * WARPS) % BLOCKS, index // (32 * WARPS * BLOCKS)
    return index // 32 % WARPS, number % RUN + number // RUN * GAP, quarter * 128 + index % 32 * 4


@triton.jit
def _load_beside(
    base: tl.tensor,
    pair_stride: tl.tensor,
    block: tl.tensor,
    chunk: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    RUN: tl.constexpr,
    GAP: tl.constexpr,
    LAST: tl.constexpr,
) -> tl.tensor:
    """Scales or zeros of a chunk of every warp, two rows' in one number, by groups of columns."""
    index = tl.arange(0, 32 * WARPS * BLOCKS)
    warp, number = index // 32 % WARPS, index // (32 * WARPS)
    own = block + number % RUN + number // RUN * GAP
    there = (warp + chunk < end) & (own <= LAST)
    loaded = ()
    for segment in tl.static_range(SEGMENTS):
        column = (warp + chunk) * CHUNK + segment * (CHUNK // SEGMENTS)
        group = tl.minimum(column // GROUP, (K - 1) // GROUP)
        places = base + group * pair_stride + own * 8 + index % 32 // 4
        loaded = loaded + (tl.load(places, mask=there, other=0),)  # noqa: RUF005
    return loaded


@triton.jit
def chunk_of_words(
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    block: tl.tensor,
    chunk: tl.tensor,
    end: tl.tensor,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    GAP: tl.constexpr,
    LAST: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """The words of one chunk of every warp, from ``chunk`` on and below ``end``, of the tile from ``block``
    on. Beyond the end zeros, and no traffic.

    The rows are BLOCK_N / 16 blocks of 16: RUN neighbouring ones from ``block`` on, then as many GAP blocks
    further; none beyond block LAST.
    """
    QUARTERS: tl.constexpr = BLOCK_K * BITS // 256
    BLOCKS: tl.constexpr = BLOCK_N // 16
    WORDS: tl.constexpr = 128 * QUARTERS  # of 32 bits, in 16 rows of a chunk
    warp, number, place = _threads(BLOCKS, WARPS, QUARTERS, RUN, GAP)
    place += number * (weight_stride * 8) + warp * WORDS
    here = weight_ptr.to(tl.pointer_type(tl.int32)) + block.to(tl.int64) * (weight_stride * 8) + chunk * WORDS
    there = (warp + chunk < end) & (block + number <= LAST)
    places = here + (place[:, None] + tl.arange(0, 4)[None, :])
    return tl.load(places, mask=there[:, None], other=0, eviction_policy="evict_first")


@triton.jit
def chunk_of_scales(
    scale_ptr: tl.tensor,
    scale_stride: tl.tensor,
    zero_ptr: tl.tensor,
    block: tl.tensor,
    chunk: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    GAP: tl.constexpr,
    LAST: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """The scales and the zeros of such a chunk's groups, as they are stored; none without groups."""
    BLOCKS: tl.constexpr = BLOCK_N // 16
    SEGMENTS: tl.constexpr = BLOCK_K // GROUP if GROUP > 0 and GROUP < BLOCK_K else 1
    scales, zeros = (), ()
    if GROUP > 0:
        scales = _load_beside(scale_ptr.to(tl.pointer_type(tl.int32)), scale_stride // 2, block, chunk, end,
                              K, GROUP, BLOCK_K, SEGMENTS, BLOCKS, WARPS, RUN, GAP, LAST)  # fmt: skip
        if zero_ptr is not None:
            zeros = _load_beside(zero_ptr.to(tl.pointer_type(tl.int16)), scale_stride // 2, block, chunk, end,
                                 K, GROUP, BLOCK_K, SEGMENTS, BLOCKS, WARPS, RUN, GAP, LAST)  # fmt: skip
    return scales, zeros


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
    end: tl.tensor,
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
    """Rows of the weight times each row of x, over chunks ``first`` to ``end`` of BLOCK_K columns; rows are
    as of ``chunk_of_words``.

    Of 4 bits DEPTH chunks of every warp are asked for before the wait for the previous kernel, and stay
    ahead. Of 8 bits every chunk is asked for at its step, together with the rows of x, the first before the
    wait: with fewer registers more programs are there at once, and that was faster.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = 16 // BITS
    QUARTERS: tl.constexpr = BLOCK_K // PARTS // 16
    BLOCKS: tl.constexpr = BLOCK_N // 16
    # Parts of a chunk that share scales; within one the sums may run on.
    SEGMENTS: tl.constexpr = BLOCK_K // GROUP if GROUP > 0 and GROUP < BLOCK_K else 1
    EACH: tl.constexpr = PARTS // SEGMENTS
    GROUPED: tl.constexpr = GROUP > 0
    AHEAD: tl.constexpr = DEPTH if BITS == 4 else 0
    OF_X: tl.constexpr = zero_ptr is not None or centre(BITS, DTYPE) == 0
    ahead, scales, zeros = (), (), ()
    for depth in tl.static_range(AHEAD):
        chunk = first + depth * WARPS
        words = chunk_of_words(weight_ptr, weight_stride, block, chunk, end, BITS, BLOCK_N, BLOCK_K, RUN, GAP,
                               LAST, WARPS)  # fmt: skip
        more_scales, more_zeros = chunk_of_scales(scale_ptr, scale_stride, zero_ptr, block, chunk, end, K,
                                                  GROUP, BLOCK_N, BLOCK_K, RUN, GAP, LAST,
                                                  WARPS)  # fmt: skip
        ahead = ahead + (words,)  # noqa: RUF005
        scales, zeros = scales + more_scales, zeros + more_zeros
    zero = tl.full((WARPS, BLOCK_N, 1, 4, 1), 1 << (BITS - 1), dtype=tl.float32)
    if not GROUPED:  # asked for before the sums, so that nothing waits for them after
        lanes = row_order(BLOCK_N)
        own = block + lanes // 16 % RUN + lanes // 16 // RUN * GAP
        row_scales = tl.load(scale_ptr + tl.minimum(own, LAST) * 16 + lanes % 16).to(tl.float32)
        if zero_ptr is not None:
            beside = tl.arange(0, 32 * WARPS * BLOCKS)
            number = beside // (32 * WARPS)
            own = tl.minimum(block + number % RUN + number // RUN * GAP, LAST)
            pair = tl.load(zero_ptr.to(tl.pointer_type(tl.int16)) + own * 8 + beside % 32 // 4)
            zero = _beside(tl.join(pair & 255, (pair >> 8) & 255), BLOCKS, WARPS)
    if AHEAD > 0:
        wait_for_previous(OVERLAP)
    ones = tl.full((WARPS, 16, 16 * QUARTERS), 1.0, dtype=tl.float32).to(DTYPE)
    nothing = tl.zeros((WARPS, BLOCK_N, BLOCK_T), dtype=tl.float32)
    none = tl.zeros((WARPS, 16, BLOCK_T), dtype=tl.float32)
    acc = nothing
    for step in tl.range(0, tl.cdiv(end - first, WARPS), num_stages=1, loop_unroll_factor=max(AHEAD, 1)):
        chunk = first + step * WARPS
        if AHEAD > 0:
            words = ahead[0]
            ahead = ahead[1:]
            rows = chunk_of_rows(x_ptr, x_stride, tokens, chunk, end, K, BITS, BLOCK_T, BLOCK_K, WARPS)
        else:
            words = chunk_of_words(weight_ptr, weight_stride, block, chunk, end, BITS, BLOCK_N, BLOCK_K, RUN,
                                   GAP, LAST, WARPS)  # fmt: skip
            if step == 0:
                wait_for_previous(OVERLAP)
                rows = chunk_of_rows(x_ptr, x_stride, tokens, chunk, end, K, BITS, BLOCK_T, BLOCK_K, WARPS)
            else:  # in a branch: else the compiler would ask for some of them only at their use, and wait
                rows = chunk_of_rows(x_ptr, x_stride, tokens, chunk, end, K, BITS, BLOCK_T, BLOCK_K, WARPS)
        operand = _words(words, BLOCKS, WARPS, QUARTERS)
        for segment in tl.static_range(SEGMENTS):
            # Freed of their excess in every chunk: it is a thousand times the numbers, and all columns' of
            # rows of one sign would leave little of a sum in fp32.
            low, high, x_low, x_high = nothing, nothing, none, none
            for part in tl.static_range(EACH):
                x = _columns(rows[segment * EACH + part], DTYPE, BLOCK_T, WARPS, QUARTERS)
                low, high, x_low, x_high = _add_part(low, high, x_low, x_high, operand, x, ones,
                                                     segment * EACH + part, BITS, DTYPE, OF_X,
                                                     ASM)  # fmt: skip
            if GROUPED and zero_ptr is not None:
                zero = _beside(tl.join(zeros[0] & 255, (zeros[0] >> 8) & 255), BLOCKS, WARPS)
                zeros = zeros[1:]
            sums = _of_numbers(low, high, x_low, x_high, zero, BLOCKS, WARPS, BLOCK_T, BITS, DTYPE, OF_X)
            if GROUPED:
                sums = sums * _beside(halves(scales[0]).to(DTYPE, bitcast=True), BLOCKS, WARPS)
                scales = scales[1:]
            acc += tl.reshape(sums, (WARPS, BLOCK_N, BLOCK_T))
        if AHEAD > 0:
            then = chunk + AHEAD * WARPS
            words = chunk_of_words(weight_ptr, weight_stride, block, then, end, BITS, BLOCK_N, BLOCK_K, RUN,
                                   GAP, LAST, WARPS)  # fmt: skip
            ahead = ahead + (words,)  # noqa: RUF005
            more_scales, more_zeros = chunk_of_scales(scale_ptr, scale_stride, zero_ptr, block, then, end, K,
                                                      GROUP, BLOCK_N, BLOCK_K, RUN, GAP, LAST,
                                                      WARPS)  # fmt: skip
            scales, zeros = scales + more_scales, zeros + more_zeros
    y = tl.sum(acc, axis=0)
    if not GROUPED:
        y *= row_scales[:, None]
    return y
