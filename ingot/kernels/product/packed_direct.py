"""The product of few rows with packed weights whose words go straight into the left operand's registers.

Owns the way from memory to the operand of a warpgroup's product, and the kernel: what a thread loads, 16
bytes at a time and a step or more ahead, is what its warp multiplies, so that words pass through no shared
memory. x has its columns in the order in which they stand there (operand_rows.py), and a descriptor copies
it. The layout is stored_weight.py's. Knows no launch: packed_matmul.py has it, and says what is computed.

    words = load_words(places, chunk, wanted, PART)
    w = numbers(operand_words(words, BLOCK_N, PART), zero, scale, 0, 4, tl.float16, PART, ASM)
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
# (Tuples grow in jitted loops.)
import triton
import triton.language as tl

from ingot.kernels.overlap import start_next, wait_for_previous
from ingot.kernels.product.fragment_product import halves, row_order
from ingot.kernels.product.packed_loads import ask_words, of_groups, side_by_side
from ingot.kernels.weight.narrow_numbers import above, ended, scaled_beside, unpack_less


@triton.jit
def word_threads(
    ptr: tl.tensor,
    stride: tl.tensor,
    block: tl.tensor,
    LAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
) -> tl.tensor:
    """Where each thread's words of a chunk lie, four times 32 bits at a time, from block ``block`` of 16 rows
    on; of blocks beyond LAST those of LAST.
    """
    BLOCKS: tl.constexpr = BLOCK_N // 16
    index = tl.arange(0, 2 * BLOCK_N * PART // 16)
    own = tl.minimum(block + index // 32 % BLOCKS, LAST)
    place = own.to(tl.int64) * (stride * 8) + index // (32 * BLOCKS) * 128 + index % 32 * 4
    return ptr.to(tl.pointer_type(tl.int32)) + (place[:, None] + tl.arange(0, 4)[None, :])


@triton.jit
def load_words(places: tl.tensor, chunk: tl.tensor, wanted: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """The words of a chunk, if they are ``wanted``; else zeros."""
    return tl.load(places + chunk * (8 * PART), mask=wanted, other=0, eviction_policy="evict_first")


@triton.jit
def pair_threads(
    ptr: tl.tensor,
    block: tl.tensor,
    LAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """Where each thread's scales (BYTES 2: of two rows) or zeros (BYTES 1: of four) of group 0 lie."""
    index = tl.arange(0, 2 * BLOCK_N)
    own = tl.minimum(block + index // 32, LAST) * (4 * BYTES) + index % 32 // 4 * BYTES // 2
    return ptr.to(tl.pointer_type(tl.int32)) + own


@triton.jit
def _beside(pairs: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Two numbers a thread as they stand beside the operand: [BLOCK_N, 1, 1, 4, 2].

    Each is there for both columns of a pair, the first in a thread's registers as in the operand: otherwise
    the compiler computes by pairs of rows and takes every result apart again.
    """
    twice = tl.reshape(tl.join(pairs, pairs), (BLOCK_N // 16, 8, 4, 2, 2))
    return tl.reshape(tl.permute(twice, (0, 3, 1, 2, 4)), (BLOCK_N, 1, 1, 4, 2))


@triton.jit
def scales_beside(pairs: tl.tensor, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Scales of two rows a thread."""
    return _beside(halves(pairs).to(DTYPE, bitcast=True), BLOCK_N)


@triton.jit
def zeros_beside(fours: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Zeros of two rows a thread, in fp32, from those of four."""
    own = fours >> (tl.arange(0, 2 * BLOCK_N) // 4 % 2 * 16)
    return _beside(tl.join(own & 255, (own >> 8) & 255), BLOCK_N).to(tl.float32)


@triton.jit
def operand_words(loaded: tl.tensor, BLOCK_N: tl.constexpr, PART: tl.constexpr) -> tl.tensor:
    """What ``load_words`` loads as it stands in the operand: int16 [BLOCK_N, PART / 16, 2, 4, 2]."""
    words = tl.reshape(halves(loaded), (PART // 16, BLOCK_N // 16, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(words, (1, 4, 2, 0, 5, 3, 6)), (BLOCK_N, PART // 16, 2, 4, 2))


@triton.jit
def numbers(
    words: tl.tensor,
    zero: tl.tensor,
    scale: tl.tensor,
    INDEX: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    PART: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Number INDEX of every word less its zero, times its scale where there is one: [BLOCK_N, PART]."""
    if ASM:
        less = (-above(INDEX, BITS, DTYPE) - zero).to(DTYPE)
        wide = unpack_less(words, tl.broadcast_to(less, words.shape), INDEX, BITS, DTYPE)
    else:
        number = (words.to(tl.int32) >> (BITS * INDEX)) & ((1 << BITS) - 1)
        wide = (number.to(tl.float32) - zero).to(DTYPE)
    if scale is not None:
        wide = scaled_beside(wide, tl.broadcast_to(scale, wide.shape), ASM)
    return tl.reshape(wide, (words.shape[0], PART))


@triton.jit(do_not_specialize=["tokens", "splits"])
def packed_direct_kernel(
    x_rows: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    scale_ptr: tl.tensor,
    scale_stride: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    splits: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
    AHEAD: tl.constexpr,
    DIRECT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """BLOCK_N outputs of BLOCK_T rows, or with ``splits`` a part of their sums, in steps of a chunk, or of
    several where weights have no groups and a step is one product (WIDE); words and what stands beside them
    are asked for DIRECT steps ahead, words into L2 AHEAD more; those of the first steps before the wait.
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PARTS: tl.constexpr = 16 // BITS
    CHUNKS: tl.constexpr = BLOCK_K // (PARTS * PART)
    HELD: tl.constexpr = CHUNKS * PART  # a row's words in a step
    LAST: tl.constexpr = (N + 15) // 16 - 1
    GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP > 0 and GROUP < BLOCK_K else 1
    SPAN: tl.constexpr = BLOCK_K // GROUPS
    if OVERLAP == 2:
        start_next(OVERLAP)
    first_token, block, split = (
        tl.program_id(0) * BLOCK_T,
        tl.program_id(1) * (BLOCK_N // 16),
        tl.program_id(2),
    )
    places = word_threads(weight_ptr, weight_stride, block, LAST, BLOCK_N, HELD)
    begin, end = split * STEPS // splits, (split + 1) * STEPS // splits
    scale_places = pair_threads(scale_ptr, block, LAST, BLOCK_N, 2)
    zero = tl.full((BLOCK_N, 1, 1, 4, 2), 1 << (BITS - 1), dtype=tl.float32)
    if zero_ptr is not None:
        zero_places = pair_threads(zero_ptr, block, LAST, BLOCK_N, 1)
        if GROUP == 0:
            zero = zeros_beside(tl.load(zero_places), BLOCK_N)
    ahead, scales, zeros = (), (), ()
    for soon in tl.static_range(DIRECT):
        there = begin + soon < end
        ahead = ahead + (load_words(places, begin + soon, there, HELD),)  # noqa: RUF005
        if GROUP > 0:
            column = (begin + soon) * BLOCK_K
            scales = scales + of_groups(scale_places, scale_stride // 2, 0, column, K, GROUP, SPAN, GROUPS)
            if zero_ptr is not None:
                zeros = zeros + of_groups(zero_places, scale_stride // 4, 0, column, K, GROUP, SPAN, GROUPS)
    if ASM and AHEAD > 0:
        for soon in tl.static_range(AHEAD):
            later = begin + DIRECT + soon
            ask_words(weight_ptr, weight_stride, block * 16, later, later < end, N, HELD, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    wait_for_previous(OVERLAP)
    for step in tl.range(begin, end):
        if ASM and AHEAD > 0:
            later = step + DIRECT + AHEAD
            ask_words(weight_ptr, weight_stride, block * 16, later, later < end, N, HELD, BLOCK_N)
        there, column = step + DIRECT < end, (step + DIRECT) * BLOCK_K
        ahead = ahead + (load_words(places, step + DIRECT, there, HELD),)  # noqa: RUF005
        if GROUP > 0:
            scales = scales + of_groups(scale_places, scale_stride // 2, 0, column, K, GROUP, SPAN, GROUPS)
            if zero_ptr is not None:
                zeros = zeros + of_groups(zero_places, scale_stride // 4, 0, column, K, GROUP, SPAN, GROUPS)
        words = operand_words(ahead[0], BLOCK_N, HELD)
        ahead = ahead[1:]
        if WIDE:
            x = x_rows.load([first_token, step * BLOCK_K])
        tiles = ()
        for part in tl.static_range(PARTS):
            scale = None
            if GROUP > 0:
                scale = scales_beside(scales[part * GROUPS // PARTS], DTYPE, BLOCK_N)
                if zero_ptr is not None:
                    zero = zeros_beside(zeros[part * GROUPS // PARTS], BLOCK_N)
            w = numbers(words, zero, scale, part, BITS, DTYPE, HELD, ASM)
            if WIDE:
                tiles = tiles + (w,)  # noqa: RUF005
            else:
                x = x_rows.load([first_token, step * BLOCK_K + part * PART])
                acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if WIDE:
            acc = tl.dot(side_by_side(tiles, PARTS, CHUNKS), tl.trans(x), acc, input_precision="ieee")
        if GROUP > 0:
            scales = scales[GROUPS:]
            if zero_ptr is not None:
                zeros = zeros[GROUPS:]
        acc = ended(acc, ASM)
    if OVERLAP == 4:
        start_next(OVERLAP)
    rows = block * 16 + row_order(BLOCK_N)
    own = tl.minimum(rows, N - 1)
    if GROUP == 0:
        acc *= tl.load(scale_ptr + own).to(tl.float32)[:, None]
    token = first_token + tl.arange(0, BLOCK_T)
    inside = (rows < N)[:, None] & (token < tokens)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + own).to(tl.float32)[:, None]
    y_rows = split.to(tl.int64) * tokens + token
    tl.store(y_ptr + y_rows[None, :] * N + rows[:, None], acc.to(y_ptr.dtype.element_ty), mask=inside)
