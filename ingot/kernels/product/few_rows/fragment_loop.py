"""The product of up to 16 rows with weights of 8 or 4 bits, loaded straight into the tensor cores' registers.

Each warp multiplies its own chunks of columns, without shared memory and without waiting for other warps; the
sums are added at the end. stored_weight.py has the layout, whose blocks of 16 rows are in the operand's
order. Values are multiplied as fragment_values.py raises them; their excess times the sum of x, a product
with ones, is subtracted in every chunk: it is a thousand times the values, and that of all columns would
leave little of a sum in fp32, if a row has one sign.

A warp asks for a later chunk before it multiplies the one it has, in a branch, so that the compiler cannot
move the loads behind the products (fragment_step_loop.py asks for none). Nothing is masked that need not be:
rows of x past the last are the last again, and chunks past the end are the last again times zeros. The
columns of a product are those that a thread holds in neighbouring registers, so that x needs no moves.
(Triton can add tuples, but has no stars in them.)

    acc = fragment_tile(x, weight, block, first, end, TILE, COUNT, LOOP)  # [BLOCK_N, BLOCK_T]
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
# (Tuples grow in jitted loops.)
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.launch_overlap import wait_for_previous
from ingot.kernels.product.few_rows.fragment_values import centre, excess, lift, raised
from ingot.kernels.product.product_arguments import InputRows, Weight


@triton.jit
def row_order(ROWS: constexpr) -> tensor:
    """Which row each of a tile's ROWS is: in an operand's order, of every 16 the even ones first."""
    lane = tl.arange(0, ROWS)
    return lane // 16 * 16 + lane % 8 * 2 + lane // 8 % 2


@triton.jit
def halves(pairs: tensor) -> tensor:
    """The two 16-bit halves of every 32-bit word, in a new last dimension."""
    return tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))


@triton.jit
def _unknown(number: tensor, LOOP: constexpr) -> tensor:
    """The same number, which the compiler cannot know: a branch on it stays a branch, and loads in it where
    they are.
    """
    if LOOP.ASM:
        number = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )
    return number


@triton.jit
def _operand(loaded: tensor, BLOCKS: constexpr, WARPS: constexpr, QUARTERS: constexpr) -> tensor:
    """Loaded words as the left operand: [WARPS, 16 BLOCKS, 16 QUARTERS] int16."""
    words = tl.reshape(halves(loaded), (QUARTERS // 2, 2, BLOCKS, WARPS, 8, 4, 2, 2, 2))
    words = tl.permute(words, (3, 2, 6, 4, 0, 7, 5, 1, 8))
    return tl.reshape(words, (WARPS, 16 * BLOCKS, 16 * QUARTERS))


@triton.jit
def _columns(
    loaded: tensor, DTYPE: constexpr, TOKENS: constexpr, WARPS: constexpr, QUARTERS: constexpr
) -> tensor:
    """Loaded columns of x as the right operand: [WARPS, 16 QUARTERS, TOKENS]."""
    x = tl.reshape(halves(loaded).to(DTYPE, bitcast=True), (TOKENS // 8, QUARTERS // 2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(x, (2, 1, 6, 4, 5, 7, 0, 3)), (WARPS, 16 * QUARTERS, TOKENS))


@triton.jit
def _beside(loaded: tensor, BLOCKS: constexpr, WARPS: constexpr) -> tensor:
    """Two fp32 per thread, of rows 2 g and 2 g + 1, in the layout of sums: [WARPS, 16 BLOCKS, 1, 4, 1]."""
    beside = tl.permute(tl.reshape(loaded, (BLOCKS, WARPS, 8, 4, 2)), (1, 0, 4, 2, 3))
    return tl.reshape(beside, (WARPS, 16 * BLOCKS, 1, 4, 1))


@triton.jit
def _scales(pairs: tensor, DTYPE: constexpr, BLOCKS: constexpr, WARPS: constexpr) -> tensor:
    if tl.bfloat16 == DTYPE:  # the upper half of an fp32
        wide = tl.join(pairs << 16, pairs & -65536).to(tl.float32, bitcast=True)
    else:
        wide = halves(pairs).to(DTYPE, bitcast=True).to(tl.float32)
    return _beside(wide, BLOCKS, WARPS)


@triton.jit
def _lifted_zeros(
    pairs: tensor, BITS: constexpr, DTYPE: constexpr, BLOCKS: constexpr, WARPS: constexpr
) -> tensor:
    """What two raised values of 0 are: zeros, two bytes per thread, plus ``excess`` less ``centre``."""
    pairs = pairs.to(tl.int32)
    if BITS == 4 and tl.bfloat16 == DTYPE:  # a zero is below the point of 128 in the upper half of an fp32
        both = tl.join((pairs & 255) << 16, (pairs & 0xFF00) << 8) | 0x43000000
        wide = both.to(tl.float32, bitcast=True)
    else:
        wide = tl.join(pairs & 255, (pairs >> 8) & 255).to(tl.float32) + (
            excess(BITS, DTYPE) - centre(BITS, DTYPE)
        )
    return _beside(wide, BLOCKS, WARPS)


@triton.jit
def apart(sums: tensor, BLOCKS: constexpr, WARPS: constexpr, TOKENS: constexpr) -> tensor:
    """Sums [WARPS, 16 BLOCKS, TOKENS] with the threads of a row in their own dimension."""
    return tl.reshape(sums, (WARPS, 16 * BLOCKS, TOKENS // 8, 4, 2))


@triton.jit
def _for_all(sums: tensor, BLOCKS: constexpr, WARPS: constexpr, TOKENS: constexpr) -> tensor:
    """Sums of x, in 16 equal rows, for all rows, apart."""
    whole = tl.broadcast_to(tl.reshape(sums, (WARPS, 1, 16, TOKENS)), (WARPS, BLOCKS, 16, TOKENS))
    return apart(tl.reshape(whole, (WARPS, 16 * BLOCKS, TOKENS)), BLOCKS, WARPS, TOKENS)


@triton.jit
def _load_rows(x: InputRows, chunk: tensor, end: tensor, EVEN: constexpr, LOOP: constexpr) -> tensor:
    """The columns of x of every warp's chunk, by parts; zeros from ``end`` and from column K on."""
    WARPS: constexpr = LOOP.WARPS
    BLOCK_K: constexpr = LOOP.BLOCK_K
    PARTS: constexpr = 16 // LOOP.BITS
    PART: constexpr = BLOCK_K // PARTS
    QUARTERS: constexpr = PART // 16
    index = tl.arange(0, 2 * LOOP.BLOCK_T * WARPS * QUARTERS)
    token, warp = index // (16 * WARPS * QUARTERS) * 8 + index // 4 % 8, index // 32 % WARPS
    token = tl.minimum(token, x.tokens - 1)
    column = warp * BLOCK_K + index // (32 * WARPS) % (QUARTERS // 2) * 32 + index % 4 * 8
    places = (token * x.stride + column)[:, None] // 2 + tl.arange(0, 4)[None, :]
    places = x.ptr.to(tl.pointer_type(tl.int32)) + chunk * (BLOCK_K // 2) + places
    real = warp + chunk < end
    loaded = ()
    for part in tl.static_range(PARTS):
        here = places + part * (PART // 2)
        if EVEN and LOOP.K % BLOCK_K == 0:
            piece = tl.load(here)
        else:
            there = real & (column + chunk * BLOCK_K + part * PART < LOOP.K)
            piece = tl.load(here, mask=there[:, None], other=0)
        loaded = loaded + (piece,)  # noqa: RUF005
    return loaded


@triton.jit
def _own_chunk(warp: tensor, chunk: tensor, end: tensor, EVEN: constexpr) -> tensor:
    return warp + chunk if EVEN else tl.minimum(warp + chunk, end - 1)


@triton.jit
def _own_blocks(number: tensor, block: tensor, TILE: constexpr) -> tensor:
    """The blocks of 16 rows of a tile's blocks; past the last the last again."""
    own = block + number % TILE[0] + number // TILE[0] * TILE[1]
    return own if TILE[3] else tl.minimum(own, TILE[2])


@triton.jit
def _load_words(
    weight: Weight,
    block: tensor,
    chunk: tensor,
    end: tensor,
    TILE: constexpr,
    EVEN: constexpr,
    LOOP: constexpr,
) -> tensor:
    """The words of every warp's chunk."""
    WARPS: constexpr = LOOP.WARPS
    QUARTERS: constexpr = LOOP.BLOCK_K * LOOP.BITS // 256
    BLOCKS: constexpr = LOOP.BLOCK_N // 16
    index = tl.arange(0, 32 * WARPS * BLOCKS * QUARTERS)
    own = _own_blocks(index // (32 * WARPS) % BLOCKS, block, TILE)
    mine = _own_chunk(index // 32 % WARPS, chunk, end, EVEN)
    place = index // (32 * WARPS * BLOCKS) * 128 + index % 32 * 4 + mine * (128 * QUARTERS)
    place = own.to(tl.int64) * (weight.stride * 8) + place
    places = weight.ptr.to(tl.pointer_type(tl.int32)) + (place[:, None] + tl.arange(0, 4)[None, :])
    return tl.load(places, eviction_policy="evict_first")


@triton.jit
def _load_beside(
    base: tensor, weight: Weight, block: tensor, chunk: tensor, end: tensor,
    TILE: constexpr, EVEN: constexpr, LOOP: constexpr,
) -> tensor:  # fmt: skip
    """Scales or zeros of every warp's chunk, two rows per word, by groups of columns."""
    WARPS: constexpr = LOOP.WARPS
    SEGMENTS: constexpr = LOOP.BLOCK_K // LOOP.GROUP if LOOP.GROUP < LOOP.BLOCK_K else 1
    index = tl.arange(0, 2 * WARPS * LOOP.BLOCK_N)
    own = _own_blocks(index // (32 * WARPS), block, TILE)
    mine = _own_chunk(index // 32 % WARPS, chunk, end, EVEN)
    loaded = ()
    for segment in tl.static_range(SEGMENTS):
        column = mine * LOOP.BLOCK_K + segment * (LOOP.BLOCK_K // SEGMENTS)
        group = tl.minimum(column // LOOP.GROUP, (LOOP.K - 1) // LOOP.GROUP)
        places = base + group * (weight.scale_stride // 2) + own * 8 + index % 32 // 4
        loaded = loaded + (tl.load(places),)  # noqa: RUF005
    return loaded


@triton.jit
def _load(
    weight: Weight,
    block: tensor,
    chunk: tensor,
    end: tensor,
    TILE: constexpr,
    EVEN: constexpr,
    LOOP: constexpr,
) -> tensor:
    """(words, scales, zeros) of every warp's chunk."""
    scales, zeros = (), ()
    if LOOP.GROUP > 0:
        base = weight.scales.to(tl.pointer_type(tl.int32))
        scales = _load_beside(base, weight, block, chunk, end, TILE, EVEN, LOOP)
        if weight.zeros is not None:
            base_of_zeros = weight.zeros.to(tl.pointer_type(tl.int16))
            zeros = _load_beside(base_of_zeros, weight, block, chunk, end, TILE, EVEN, LOOP)
    words = _load_words(weight, block, chunk, end, TILE, EVEN, LOOP)
    return words, scales, zeros


@triton.jit
def _multiplied(
    chunk: tensor, rows: tensor, acc: tensor, zero: tensor, DTYPE: constexpr, LOOP: constexpr
) -> tensor:
    """``acc`` [WARPS, BLOCK_N, BLOCK_T / 8, 4, 2] plus a chunk's products; ``zero``: of whole rows."""
    BITS: constexpr = LOOP.BITS
    WARPS: constexpr = LOOP.WARPS
    TOKENS: constexpr = LOOP.BLOCK_T
    BLOCKS: constexpr = LOOP.BLOCK_N // 16
    PARTS: constexpr = 16 // BITS
    QUARTERS: constexpr = LOOP.BLOCK_K // PARTS // 16
    SEGMENTS: constexpr = LOOP.BLOCK_K // LOOP.GROUP if LOOP.GROUP > 0 and LOOP.GROUP < LOOP.BLOCK_K else 1
    EACH: constexpr = PARTS // SEGMENTS
    LIFTED: constexpr = BITS == 4 and tl.float16 == DTYPE
    words, scales, zeros = chunk
    OF_X: constexpr = len(zeros) > 0 or centre(BITS, DTYPE) == 0 or zero is not None
    ones = tl.full((WARPS, 16, 16 * QUARTERS), 1.0, dtype=tl.float32).to(DTYPE)
    nothing = tl.zeros((WARPS, 16 * BLOCKS, TOKENS), dtype=tl.float32)
    none = tl.zeros((WARPS, 16, TOKENS), dtype=tl.float32)
    operand = _operand(words, BLOCKS, WARPS, QUARTERS)
    for segment in tl.static_range(SEGMENTS):
        low, high, x_low, x_high = nothing, nothing, none, none
        for each in tl.static_range(EACH):
            columns = _columns(rows[segment * EACH + each], DTYPE, TOKENS, WARPS, QUARTERS)
            wide = raised(operand, segment * EACH + each, BITS, DTYPE, LOOP.ASM)
            if lift(segment * EACH + each, BITS, DTYPE) == 1.0:
                low = tl.dot(wide, columns, low)
                if OF_X:
                    x_low = tl.dot(ones, columns, x_low)
            else:
                high = tl.dot(wide, columns, high)
                x_high = tl.dot(ones, columns, x_high)
        sums = apart(low + 0.0625 * high if LIFTED else low, BLOCKS, WARPS, TOKENS)
        if OF_X:
            raised_zero = zero
            if len(zeros) > 0:
                raised_zero = _lifted_zeros(zeros[segment], BITS, DTYPE, BLOCKS, WARPS)
            elif zero is None:
                raised_zero = (1 << (BITS - 1)) + (excess(BITS, DTYPE) - centre(BITS, DTYPE))
            sums -= raised_zero * _for_all(x_low, BLOCKS, WARPS, TOKENS)
            if LIFTED:  # a lifted value has a sixteenth of the excess
                too_much = raised_zero - excess(BITS, DTYPE) * 0.9375
                sums -= too_much * _for_all(x_high, BLOCKS, WARPS, TOKENS)
        if LOOP.GROUP > 0:
            acc += sums * _scales(scales[segment], DTYPE, BLOCKS, WARPS)
        else:
            acc += sums
    return acc


@triton.jit
def _row_scales(weight: Weight, block: tensor, TILE: constexpr, LOOP: constexpr) -> tensor:
    """Scales of a tile's rows, in a weight without groups: [BLOCK_N] by ``row_order``."""
    lanes = row_order(LOOP.BLOCK_N)
    return tl.load(weight.scales + _own_blocks(lanes // 16, block, TILE) * 16 + lanes % 16)


@triton.jit
def _row_zeros(weight: Weight, block: tensor, TILE: constexpr, DTYPE: constexpr, LOOP: constexpr) -> tensor:
    """Raised zeros of a tile's rows, in a weight without groups."""
    index = tl.arange(0, 2 * LOOP.WARPS * LOOP.BLOCK_N)
    own = _own_blocks(index // (32 * LOOP.WARPS), block, TILE)
    pair = tl.load(weight.zeros.to(tl.pointer_type(tl.int16)) + own * 8 + index % 32 // 4)
    return _lifted_zeros(pair, LOOP.BITS, DTYPE, LOOP.BLOCK_N // 16, LOOP.WARPS)


@triton.jit
def fragment_tile(
    x: InputRows, weight: Weight, block: tensor, first: tensor, end: tensor,
    TILE: constexpr, COUNT: constexpr, LOOP: constexpr,
) -> tensor:  # fmt: skip
    """Rows of the weight times each row of x, over chunks ``first`` to ``end`` of BLOCK_K columns.

    TILE (RUN, GAP, LAST, WHOLE) says which rows, in blocks of 16: RUN neighbours from ``block`` on, then as
    many GAP blocks further, none past block LAST; WHOLE: no block of any tile is. COUNT: chunks of each warp,
    0 if warps have different numbers of them. FRAGMENTS 2: a warp loads one chunk ahead, 3: two.
    """
    DTYPE: constexpr = x.ptr.dtype.element_ty
    BLOCK_N: constexpr = LOOP.BLOCK_N
    WARPS: constexpr = LOOP.WARPS
    AHEAD: constexpr = LOOP.FRAGMENTS - 1 if LOOP.FRAGMENTS > 1 else 1
    EVEN: constexpr = COUNT > 0
    ahead = ()
    for depth in tl.static_range(AHEAD):
        if not EVEN or depth < COUNT:
            ahead = ahead + (_load(weight, block, first + depth * WARPS, end, TILE, EVEN, LOOP),)  # noqa: RUF005
    zero = None
    if LOOP.GROUP == 0:  # loaded before the sums, so that nothing waits for them after
        row_scales = _row_scales(weight, block, TILE, LOOP)
        if weight.zeros is not None:
            zero = _row_zeros(weight, block, TILE, DTYPE, LOOP)
    acc = tl.zeros((WARPS, BLOCK_N, LOOP.BLOCK_T // 8, 4, 2), dtype=tl.float32)
    wait_for_previous(LOOP.OVERLAP)
    if EVEN and COUNT <= 2:
        for step in tl.static_range(COUNT):
            rows = _load_rows(x, first + step * WARPS, end, EVEN, LOOP)
            if step + AHEAD < COUNT:
                more = _load(weight, block, first + (step + AHEAD) * WARPS, end, TILE, EVEN, LOOP)
                ahead = ahead + (more,)  # noqa: RUF005
            acc = _multiplied(ahead[step], rows, acc, zero, DTYPE, LOOP)
    else:
        steps = _unknown(tl.cdiv(end - first, WARPS), LOOP)
        for step in tl.range(0, steps, num_stages=1, loop_unroll_factor=AHEAD + 1):
            chunk = first + step * WARPS
            rows = _load_rows(x, chunk, end, EVEN, LOOP)
            now = ahead[0]
            if step + AHEAD < steps:
                then = _load(weight, block, chunk + AHEAD * WARPS, end, TILE, EVEN, LOOP)
            else:
                then = now
            ahead = ahead[1:] + (then,)  # noqa: RUF005
            acc = _multiplied(now, rows, acc, zero, DTYPE, LOOP)
    y = tl.sum(tl.reshape(acc, (WARPS, BLOCK_N, LOOP.BLOCK_T)), axis=0)
    if LOOP.GROUP == 0:
        y *= row_scales.to(tl.float32)[:, None]
    return y
