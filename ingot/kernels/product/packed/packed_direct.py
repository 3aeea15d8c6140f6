"""The product of few rows with packed weights whose words go straight into the left operand's registers.

A thread loads, 16 bytes at a time and a step or more ahead, the words that its warp multiplies, so that they
pass through no shared memory. The columns of x are in the order of those words (operand_rows.py), and a
descriptor copies x. stored_weight.py has the layout, packed_matmul.py the launch.

    words = load_words(places, chunk, wanted, PART)
    w = unpacked(operand_words(words, BLOCK_N, PART), zero, scale, 0, 4, tl.float16, PART, ASM)
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
# (Tuples grow in jitted loops.)
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.launch_overlap import start_next, wait_for_previous
from ingot.kernels.product.few_rows.fragment_loop import halves, row_order
from ingot.kernels.product.packed.packed_loads import ask_words, of_groups, side_by_side, store_packed
from ingot.kernels.product.product_arguments import Weight
from ingot.kernels.weight.narrow_values import above, ended, scaled_beside, unpack_less


@triton.jit
def word_threads(
    ptr: tensor, stride: tensor, block: tensor, LAST: constexpr, BLOCK_N: constexpr, PART: constexpr
) -> tensor:
    """Pointers to each thread's words of a chunk, four times 32 bits each, from block ``block`` of 16 rows
    on; past block LAST those of LAST.
    """
    BLOCKS: constexpr = BLOCK_N // 16
    index = tl.arange(0, 2 * BLOCK_N * PART // 16)
    own = tl.minimum(block + index // 32 % BLOCKS, LAST)
    place = own.to(tl.int64) * (stride * 8) + index // (32 * BLOCKS) * 128 + index % 32 * 4
    return ptr.to(tl.pointer_type(tl.int32)) + (place[:, None] + tl.arange(0, 4)[None, :])


@triton.jit
def load_words(places: tensor, chunk: tensor, wanted: tensor, PART: constexpr) -> tensor:
    """The words of a chunk; zeros if not ``wanted``."""
    return tl.load(places + chunk * (8 * PART), mask=wanted, other=0, eviction_policy="evict_first")


@triton.jit
def pair_threads(ptr: tensor, block: tensor, LAST: constexpr, BLOCK_N: constexpr, BYTES: constexpr) -> tensor:
    """Pointers to each thread's scales (BYTES 2: two rows) or zeros (BYTES 1: four rows) of group 0."""
    index = tl.arange(0, 2 * BLOCK_N)
    own = tl.minimum(block + index // 32, LAST) * (4 * BYTES) + index % 32 // 4 * BYTES // 2
    return ptr.to(tl.pointer_type(tl.int32)) + own


@triton.jit
def _beside(pairs: tensor, BLOCK_N: constexpr) -> tensor:
    """Two values per thread in the operand's layout: [BLOCK_N, 1, 1, 4, 2].

    Each is there for both columns of a pair: otherwise the compiler computes by pairs of rows and takes every
    result apart again.
    """
    twice = tl.reshape(tl.join(pairs, pairs), (BLOCK_N // 16, 8, 4, 2, 2))
    return tl.reshape(tl.permute(twice, (0, 3, 1, 2, 4)), (BLOCK_N, 1, 1, 4, 2))


@triton.jit
def scales_beside(pairs: tensor, DTYPE: constexpr, BLOCK_N: constexpr) -> tensor:
    """Scales of two rows per thread."""
    return _beside(halves(pairs).to(DTYPE, bitcast=True), BLOCK_N)


@triton.jit
def zeros_beside(fours: tensor, BLOCK_N: constexpr) -> tensor:
    """Zeros of two rows per thread, in fp32, from those of four."""
    own = fours >> (tl.arange(0, 2 * BLOCK_N) // 4 % 2 * 16)
    return _beside(tl.join(own & 255, (own >> 8) & 255), BLOCK_N).to(tl.float32)


@triton.jit
def operand_words(loaded: tensor, BLOCK_N: constexpr, PART: constexpr) -> tensor:
    """What ``load_words`` loads, in the operand's layout: int16 [BLOCK_N, PART / 16, 2, 4, 2]."""
    words = tl.reshape(halves(loaded), (PART // 16, BLOCK_N // 16, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(words, (1, 4, 2, 0, 5, 3, 6)), (BLOCK_N, PART // 16, 2, 4, 2))


@triton.jit
def unpacked(
    words: tensor,
    zero: tensor,
    scale: tensor,
    INDEX: constexpr,
    BITS: constexpr,
    DTYPE: constexpr,
    PART: constexpr,
    ASM: constexpr,
) -> tensor:
    """Value INDEX of every word less its zero, times its scale if there is one: [BLOCK_N, PART]."""
    if ASM:
        less = (-above(INDEX, BITS, DTYPE) - zero).to(DTYPE)
        wide = unpack_less(words, tl.broadcast_to(less, words.shape), INDEX, BITS, DTYPE)
    else:
        value = (words.to(tl.int32) >> (BITS * INDEX)) & ((1 << BITS) - 1)
        wide = (value.to(tl.float32) - zero).to(DTYPE)
    if scale is not None:
        wide = scaled_beside(wide, tl.broadcast_to(scale, wide.shape), ASM)
    return tl.reshape(wide, (words.shape[0], PART))


@triton.jit
def _step(
    weight: Weight,
    places: tensor,
    scale_places: tensor,
    zero_places: tensor,
    step: tensor,
    end: tensor,
    PART: constexpr,
    LOOP: constexpr,
) -> tensor:
    """A step's words (zeros from ``end`` on), scales and zeros, each a tuple."""
    words = (load_words(places, step, step < end, PART),)
    scales, zeros = (), ()
    if LOOP.GROUP > 0:
        column = step * LOOP.BLOCK_K
        scales = of_groups(scale_places, weight.scale_stride // 2, 0, column, LOOP)
        if weight.zeros is not None:
            zeros = of_groups(zero_places, weight.scale_stride // 4, 0, column, LOOP)
    return words, scales, zeros


@triton.jit(do_not_specialize=["tokens", "splits"])
def packed_direct_kernel(
    x_rows: tensor,
    weight: tensor,
    bias_ptr: tensor,
    y_ptr: tensor,
    tokens: tensor,
    splits: tensor,
    LOOP: constexpr,
) -> None:
    """BLOCK_N outputs of BLOCK_T rows, or with ``splits`` a part of their sums, in steps of a chunk, or of
    several if weights have no groups and a step is one product (WIDE). Words, scales and zeros are loaded
    DIRECT steps ahead, words prefetched into L2 AHEAD more; those of the first steps before the wait.
    """
    weight = Weight(*weight)
    K: constexpr = LOOP.K
    N: constexpr = LOOP.N
    BITS: constexpr = LOOP.BITS
    GROUP: constexpr = LOOP.GROUP
    PART: constexpr = LOOP.PART
    DTYPE: constexpr = LOOP.DTYPE
    ASM: constexpr = LOOP.ASM
    AHEAD: constexpr = LOOP.AHEAD if ASM else 0
    BLOCK_T: constexpr = LOOP.BLOCK_T
    BLOCK_N: constexpr = LOOP.BLOCK_N
    BLOCK_K: constexpr = LOOP.BLOCK_K
    DIRECT: constexpr = LOOP.DIRECT
    STEPS: constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PARTS: constexpr = 16 // BITS
    CHUNKS: constexpr = BLOCK_K // (PARTS * PART)
    HELD: constexpr = CHUNKS * PART  # words per row and step
    LAST: constexpr = (N + 15) // 16 - 1
    GROUPS: constexpr = BLOCK_K // GROUP if GROUP > 0 and GROUP < BLOCK_K else 1
    if LOOP.OVERLAP == 2:
        start_next(LOOP.OVERLAP)
    first_token, block, split = (
        tl.program_id(0) * BLOCK_T,
        tl.program_id(1) * (BLOCK_N // 16),
        tl.program_id(2),
    )
    places = word_threads(weight.ptr, weight.stride, block, LAST, BLOCK_N, HELD)
    begin, end = split * STEPS // splits, (split + 1) * STEPS // splits
    scale_places = pair_threads(weight.scales, block, LAST, BLOCK_N, 2)
    zero = tl.full((BLOCK_N, 1, 1, 4, 2), 1 << (BITS - 1), dtype=tl.float32)
    zero_places = scale_places
    if weight.zeros is not None:
        zero_places = pair_threads(weight.zeros, block, LAST, BLOCK_N, 1)
        if GROUP == 0:
            zero = zeros_beside(tl.load(zero_places), BLOCK_N)
    ahead, scales, zeros = (), (), ()
    for soon in tl.static_range(DIRECT):
        words, more_scales, more_zeros = _step(weight, places, scale_places, zero_places, begin + soon, end,
                                               HELD, LOOP)  # fmt: skip
        ahead, scales, zeros = ahead + words, scales + more_scales, zeros + more_zeros
    if AHEAD > 0:
        for soon in tl.static_range(AHEAD):
            later = begin + DIRECT + soon
            ask_words(weight, block * 16, later, later < end, HELD, LOOP)
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    wait_for_previous(LOOP.OVERLAP)
    for step in tl.range(begin, end):
        if AHEAD > 0:
            later = step + DIRECT + AHEAD
            ask_words(weight, block * 16, later, later < end, HELD, LOOP)
        words, more_scales, more_zeros = _step(weight, places, scale_places, zero_places, step + DIRECT, end,
                                               HELD, LOOP)  # fmt: skip
        ahead, scales, zeros = ahead + words, scales + more_scales, zeros + more_zeros
        operand = operand_words(ahead[0], BLOCK_N, HELD)
        ahead = ahead[1:]
        if LOOP.WIDE:
            x = x_rows.load([first_token, step * BLOCK_K])
        tiles = ()
        for part in tl.static_range(PARTS):
            scale = None
            if GROUP > 0:
                scale = scales_beside(scales[part * GROUPS // PARTS], DTYPE, BLOCK_N)
                if weight.zeros is not None:
                    zero = zeros_beside(zeros[part * GROUPS // PARTS], BLOCK_N)
            w = unpacked(operand, zero, scale, part, BITS, DTYPE, HELD, ASM)
            if LOOP.WIDE:
                tiles = tiles + (w,)  # noqa: RUF005
            else:
                x = x_rows.load([first_token, step * BLOCK_K + part * PART])
                acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if LOOP.WIDE:
            acc = tl.dot(side_by_side(tiles, PARTS, CHUNKS), tl.trans(x), acc, input_precision="ieee")
        if GROUP > 0:
            scales = scales[GROUPS:]
            if weight.zeros is not None:
                zeros = zeros[GROUPS:]
        acc = ended(acc, ASM)
    if LOOP.OVERLAP == 4:
        start_next(LOOP.OVERLAP)
    rows = block * 16 + row_order(BLOCK_N)
    own = tl.minimum(rows, N - 1)
    store_packed(acc, rows, own, first_token, split, tokens, weight, bias_ptr, y_ptr, LOOP)
