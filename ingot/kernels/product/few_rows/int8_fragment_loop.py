"""Products of up to 16 rows in 8 bits and a weight of 4 bits inside 8, loaded straight into registers.

Each warp multiplies its own chunks of columns, without shared memory and without waiting for other warps; the
sums are added at the end. A thread loads 16 neighbouring bytes of a row, of the weight's pairs and of x
alike: what tensor-core instructions need of that thread, except for the order of columns, which is the same
on both sides. No value moves between threads or, with the weight as the right operand, between registers. A
weight of whole bytes read this way was slower than through shared memory (docs/performance/int8.md).

    acc = int8_fragment_tile(x, weight, start, first, end, N, RUN, GAP, LOOP)  # [BLOCK_N, 16]
"""

from __future__ import annotations

# mypy: disable-error-code="assignment, misc"
# (Tuples grow in jitted loops.)
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.launch_overlap import wait_for_previous
from ingot.kernels.product.product_arguments import InputRows, Weight
from ingot.kernels.weight.expand_int8 import stepped

ROWS = tl.constexpr(16)  # of x: the rows of a tensor-core instruction


_BYTES = tl.constexpr("mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;")


@triton.jit
def _loaded(
    source: tensor,
    places: tensor,
    column: tensor,
    there: tensor,
    K: constexpr,
    BLOCK_K: constexpr,
    ONCE: constexpr,
) -> tensor:
    """16 bytes from each place [P] on as int32 [P, 4], zeros where not ``there`` and from column K on.

    They stay words until they are multiplied: carried bytes would take a register each.
    """
    if K % BLOCK_K != 0:
        there = there & (column < K)
    words = source.to(tl.pointer_type(tl.int32)) + (places // 4)[:, None] + tl.arange(0, 4)[None, :]
    if ONCE:
        return tl.load(words, mask=there[:, None], other=0, eviction_policy="evict_first")
    return tl.load(words, mask=there[:, None], other=0)


@triton.jit
def _bytes(words: tensor, ASM: constexpr) -> tensor:
    """The bytes of words [P, 4]: int8 [P, 4, 2, 2], byte, half and quarter of the words."""
    if ASM:  # the registers as they are: four words are four bytes of each of four tensors
        a, b, c, d = tl.inline_asm_elementwise(
            _BYTES, "=r,=r,=r,=r,r,r,r,r", [words], (tl.int8, tl.int8, tl.int8, tl.int8), True, 4
        )
        found = tl.join(tl.join(a, c), tl.join(b, d))
    else:
        a, b = (words & 255).to(tl.int8), (words >> 8 & 255).to(tl.int8)
        c, d = (words >> 16 & 255).to(tl.int8), (words >> 24 & 255).to(tl.int8)
        found = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (words.shape[0], 2, 2, 4))
        found = tl.permute(found, (0, 3, 1, 2))
    return found


@triton.jit
def _chunk(
    pairs: tensor,
    weight: Weight,
    places: tensor,
    row: tensor,
    column: tensor,
    there: tensor,
    chunk: tensor,
    BYTES: constexpr,
    LOOP: constexpr,
) -> tensor:
    """A chunk's pairs [P, 4], and zero · 256 + step of each place's row and group of columns, int32."""
    HALF: constexpr = LOOP.WEIGHT_GROUP // 2
    BLOCK_BYTES: constexpr = LOOP.BLOCK_K // 2
    here = chunk * BLOCK_BYTES
    words = _loaded(pairs + here, places, here + column, there, BYTES, BLOCK_BYTES, True)
    group = (here + column) // HALF
    levels = group * weight.scale_stride + row
    there = there & (group < BYTES // HALF)
    steps = tl.load(weight.steps + levels, mask=there, other=0).to(tl.int32)
    return words, tl.load(weight.zeros + levels, mask=there, other=0).to(tl.int32) << 8 | steps


@triton.jit
def _of_four_bits(words: tensor, beside: tensor, ASM: constexpr) -> tensor:
    """Pairs of 4 bits [P, 4] as bytes: int8 [P, 4, 2, 2, 2], last the halves of a group."""
    steps, zeros = beside & 255, beside >> 8
    shifts = (steps * zeros * 0x01010101)[:, None]
    low = stepped(words & 0x0F0F0F0F, steps[:, None], shifts)
    high = stepped(words >> 4 & 0x0F0F0F0F, steps[:, None], shifts)
    return tl.join(_bytes(low, ASM), _bytes(high, ASM))


@triton.jit
def _group_scales(x: InputRows, chunk: tensor, end: tensor, WARPS: constexpr) -> tensor:
    """Each warp's scales of its chunk in the layout of sums: fp32 [WARPS, 2, 8, 1, 4, 1]."""
    index = tl.arange(0, 32 * WARPS)
    group = index // 32 + chunk
    token = (index // 4 % 8)[:, None] + 8 * tl.arange(0, 2)[None, :]
    places = group[:, None] + token * 0
    if x.scale_stride is not None:
        places += token * x.scale_stride
    there = (group < end)[:, None] & (token < x.tokens)
    scales = tl.reshape(tl.load(x.scales + places, mask=there, other=0.0), (WARPS, 8, 4, 2))
    return tl.reshape(tl.permute(scales, (0, 3, 1, 2)), (WARPS, 2, 8, 1, 4, 1))


@triton.jit
def int8_fragment_tile(
    x: InputRows,
    weight: Weight,
    start: tensor,
    first: tensor,
    end: tensor,
    N: constexpr,
    RUN: constexpr,
    GAP: constexpr,
    LOOP: constexpr,
) -> tensor:
    """Rows of the weight times each row of x, over chunks ``first`` to ``end`` of BLOCK_K columns, which are
    a group if columns of x share scales: [BLOCK_N, 16], int32 without scales of x, else fp32.

    The weight (int4_weight.py) has groups of WEIGHT_GROUP columns; a thread has 16 bytes of pairs of two
    spans of 64 columns, and x is loaded in their order. The rows are RUN neighbours from ``start`` on, then
    as many GAP rows further.

    Each warp loads FRAGMENTS - 1 chunks before the wait for the previous kernel, and stays ahead; with none
    it loads a chunk at its step, with the rows of x, the first before the wait: fewer registers, more
    programs at once. There must be a chunk: its step waits.
    """
    K: constexpr = LOOP.K
    GROUP: constexpr = LOOP.GROUP
    HALF: constexpr = LOOP.WEIGHT_GROUP // 2
    BLOCK_N: constexpr = LOOP.BLOCK_N
    BLOCK_K: constexpr = LOOP.BLOCK_K
    WARPS: constexpr = LOOP.WARPS
    DEPTH: constexpr = LOOP.FRAGMENTS - 1
    QUARTERS: constexpr = BLOCK_K // 64
    BLOCKS: constexpr = BLOCK_N // 8
    SPANS: constexpr = QUARTERS // 2  # of 64 bytes of pairs
    BLOCK_BYTES: constexpr = BLOCK_K // 2
    GROUPS: constexpr = (K + 2 * HALF - 1) // (2 * HALF)
    BYTES: constexpr = GROUPS * HALF  # of a row
    index = tl.arange(0, 32 * WARPS * BLOCKS * SPANS)
    own = index // (32 * WARPS) % BLOCKS * 8 + index // 4 % 8
    row = tl.minimum(own % RUN + own // RUN * GAP, N - 1 - start)
    warp = index // 32 % WARPS
    column = warp * BLOCK_BYTES + index // (32 * WARPS * BLOCKS) * 64 + index % 4 * 16
    places = row * weight.stride + column  # of 32 bits, from the tile's first row on
    pairs = weight.ptr + start.to(tl.int64) * weight.stride
    x_index = tl.arange(0, 64 * WARPS * QUARTERS)
    x_warp, token = x_index // 32 % WARPS, x_index // (32 * WARPS) % 2 * 8 + x_index // 4 % 8
    x_column = x_index // (64 * WARPS) * 64 + x_index % 4 * 16
    if HALF == 32:
        x_column = x_column // 128 * 128 + x_index % 4 // 2 * 64 + x_column // 64 % 2 * 32 + x_index % 2 * 16
    x_column += x_warp * BLOCK_K
    x_places = token * x.stride + x_column
    ahead, beside = (), ()
    for depth in tl.static_range(DEPTH):
        chunk = first + depth * WARPS
        words, levels = _chunk(
            pairs, weight, places, start + row, column, warp + chunk < end, chunk, BYTES, LOOP
        )
        ahead = ahead + (words,)  # noqa: RUF005 - Triton knows no stars in tuples
        beside = beside + (levels,)  # noqa: RUF005
    if x.scales is not None:  # constants: loaded before the wait
        lane = tl.arange(0, BLOCK_N)
        scales = tl.load(weight.scales + tl.minimum(start + lane % RUN + lane // RUN * GAP, N - 1))
    acc = tl.zeros((WARPS, ROWS, BLOCK_N), dtype=tl.float32 if GROUP > 0 else tl.int32)
    x_scales = tl.zeros((ROWS,), dtype=tl.float32)
    for step in tl.range(0, tl.cdiv(end - first, WARPS), num_stages=1, loop_unroll_factor=max(DEPTH, 1)):
        chunk = first + step * WARPS
        if DEPTH > 0:
            words, levels = ahead[0], beside[0]
            ahead, beside = ahead[1:], beside[1:]
        else:
            words, levels = _chunk(
                pairs, weight, places, start + row, column, warp + chunk < end, chunk, BYTES, LOOP
            )
        here = chunk * BLOCK_K
        there = (x_warp + chunk < end) & (token < x.tokens)
        if step == 0:
            wait_for_previous(LOOP.OVERLAP)
            loaded = _loaded(x.ptr + here, x_places, here + x_column, there, K, BLOCK_K, False)
            if x.scales is not None:  # noqa: SIM102 - a pointer that is None, and a constant
                if GROUP == 0:
                    real = tl.arange(0, ROWS)
                    x_scales = tl.load(x.scales + real * x.scale_stride, mask=real < x.tokens, other=0.0)
        else:  # in a branch: otherwise the compiler would load some of x only at its use, and wait each time
            loaded = _loaded(x.ptr + here, x_places, here + x_column, there, K, BLOCK_K, False)
        loaded = tl.reshape(_bytes(loaded, LOOP.ASM), (QUARTERS, 2, WARPS, 8, 4, 4, 2, 2))
        loaded = tl.reshape(tl.permute(loaded, (2, 1, 3, 0, 6, 4, 7, 5)), (WARPS, ROWS, BLOCK_K))
        w = tl.reshape(_of_four_bits(words, levels, LOOP.ASM), (SPANS, BLOCKS, WARPS, 8, 4, 4, 2, 2, 2))
        w = tl.reshape(tl.permute(w, (2, 0, 8, 6, 4, 7, 5, 1, 3)), (WARPS, BLOCK_K, BLOCK_N))
        if GROUP > 0:
            own_scales = _group_scales(x, chunk, end, WARPS)
            sums = tl.dot(loaded, w, out_dtype=tl.int32).to(tl.float32)
            sums = tl.reshape(sums, (WARPS, 2, 8, BLOCKS, 4, 2)) * own_scales
            acc += tl.reshape(sums, (WARPS, ROWS, BLOCK_N))
        else:
            acc = tl.dot(loaded, w, acc, out_dtype=tl.int32)
        if DEPTH > 0:
            then = chunk + DEPTH * WARPS
            words, levels = _chunk(
                pairs, weight, places, start + row, column, warp + then < end, then, BYTES, LOOP
            )
            ahead = ahead + (words,)  # noqa: RUF005
            beside = beside + (levels,)  # noqa: RUF005
    total = tl.sum(acc, axis=0)
    if x.scales is not None:
        if GROUP == 0:
            total = total.to(tl.float32) * x_scales[:, None]
        total *= scales[None, :]
    return tl.trans(total)
