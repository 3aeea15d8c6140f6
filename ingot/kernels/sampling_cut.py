"""Where top-k and top-p cut a row, without sorting it.

Owns the selection. What the tiles' highest scores prove to lie below every cut is left out first: below the
k-th highest of them, top-k lets nothing through; below a distance where all of V together would weigh less
than top-p may drop, top-p cuts nothing. A histogram of the scores that remain, over their distance from the
highest, with exact counts and exact integer weights, says in which bins the cuts lie; the scores of these
bins are listed, and a bisection over the list finds the cut: a score, and how many tokens of that score stay
(lowest ids first). All sums are of integers, so no order of programs changes them. Knows no draw.

Bins that hold more scores than the list (hundreds of thousands of scores that are nearly equal, but not
equal) are bisected over the row itself: the same cut, in milliseconds.

    bin_scores_kernel, list_scores_kernel, find_cut_kernel, in that order after tile_tops_kernel
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.overlap import start_next, wait_for_previous
from ingot.kernels.sampling_rows import (
    FLOAT32_MAX,
    INT32_MAX,
    WEIGHT_ONE,
    key_of,
    load_scores,
    value_of,
    weights_of,
)

PLACES = ("temperature_ptr", "top_k_ptr", "top_p_ptr")  # rows of a stack: their alignment varies with B
LEAST_KEY = tl.constexpr(-0x7F800001)  # of -inf
FARTHEST = tl.constexpr(28.0)  # exp(-28) 2**40 < 1: what lies farther below the top weighs nothing
LEAST_REACH = tl.constexpr(1e-30)
COMPARED_TILES = tl.constexpr(256)  # each with each,
COMPARED_ONCE = tl.constexpr(16)  # with as many at a time


@triton.jit
def _distance(scores: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """How far below the top, in units of the temperature: minus the exponent of the weight."""
    return -((scores.to(tl.float64) - top) / temperature)


@triton.jit
def _bins(
    scores: tl.tensor, top: tl.tensor, temperature: tl.tensor, reach: tl.tensor, BINS: tl.constexpr
) -> tl.tensor:
    """Bin 0 holds the highest scores; -1 where a score lies beyond the reach of the cuts."""
    distance = _distance(scores, top, temperature)
    near = distance <= reach
    bins = (tl.where(near, distance, 0.0) * (BINS / reach)).to(tl.int32)
    return tl.where(near, tl.minimum(bins, BINS - 1), -1)


@triton.jit
def _reach(
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A row's highest score, and the distance from it beyond which no cut lies; both float64."""
    tiles = tl.arange(0, BLOCK_TILES)
    high = tl.load(high_ptr + row * TILES + tiles, mask=tiles < TILES, other=float("-inf"))
    low = tl.load(low_ptr + row * TILES + tiles, mask=tiles < TILES, other=float("inf"))
    top = tl.maximum(tl.max(high, axis=0), -FLOAT32_MAX).to(tl.float64)
    reach = tl.minimum(_distance(tl.min(low, axis=0), top, temperature), FARTHEST)
    if top_k > 0:
        if BLOCK_TILES <= COMPARED_TILES:
            as_high = tl.zeros([BLOCK_TILES], dtype=tl.int32)
            for start in range(0, TILES, COMPARED_ONCE):
                some = start + tl.arange(0, COMPARED_ONCE)
                other = tl.load(high_ptr + row * TILES + some, mask=some < TILES, other=float("-inf"))
                as_high += tl.sum((other[None, :] >= high[:, None]).to(tl.int32), axis=1)
            kth = tl.max(tl.where(as_high >= top_k, high, float("-inf")), axis=0)
            reach = tl.minimum(reach, _distance(kth, top, temperature))
    else:
        least = tl.sum(weights_of(high, top, temperature), axis=0).to(tl.float64)
        # All tokens beyond weigh at most VOCAB exp(-reach), which is to be below 1 - top_p of the total.
        mass = VOCAB * WEIGHT_ONE / ((1.0 - top_p) * tl.maximum(least, 1.0))
        reach = tl.minimum(reach, tl.log(mass) + 0.01)
    return top, tl.maximum(reach, LEAST_REACH)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def bin_scores_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
    reach_ptr: tl.tensor,
    bin_weights_ptr: tl.tensor,
    bin_counts_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Count a row's scores by bin where it has a top-k, and sum their weights where it has a top-p.

    The weight of what lies beyond the reach, which is part of top-p's total, joins the last bin.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        top, reach = _reach(high_ptr, low_ptr, row, temperature, top_k, top_p, VOCAB, TILES, BLOCK_TILES)
        if tl.program_id(0) == 0:
            tl.store(reach_ptr + 2 * row, top)
            tl.store(reach_ptr + 2 * row + 1, reach)
        beyond = tl.zeros([], dtype=tl.int64)
        farthest = tl.where(top_k > 0, reach, FARTHEST)
        for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
            if _distance(tl.load(high_ptr + row * TILES + tile), top, temperature) <= farthest:
                ids = tile * TILE + tl.arange(0, TILE)
                scores = load_scores(logits_ptr + row * row_stride, ids, VOCAB)
                bins = _bins(scores, top, temperature, reach, BINS)
                place = row * BINS + bins
                if top_k > 0:
                    tl.atomic_add(bin_counts_ptr + place, 1, mask=bins >= 0, sem="relaxed")
                if top_p < 1:
                    weights = weights_of(scores, top, temperature)
                    counted = (bins >= 0) & (weights > 0)
                    tl.atomic_add(bin_weights_ptr + place, weights, mask=counted, sem="relaxed")
                    beyond += tl.sum(tl.where(bins < 0, weights, 0), axis=0)
        if (top_k <= 0) & (beyond > 0):
            tl.atomic_add(bin_weights_ptr + row * BINS + BINS - 1, beyond, sem="relaxed")


@triton.jit
def _weight_bin(weights: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """The first bin at whose end the running sum of weights reaches ``limit``."""
    return tl.sum((tl.cumsum(weights, axis=0).to(tl.float64) < limit).to(tl.int32), axis=0)


@triton.jit
def _count_bin(
    weights: tl.tensor, counts: tl.tensor, top_k: tl.tensor, BINS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The bin of the top_k-th score, BINS where all stay; counts and weights before it; its weight."""
    bins = tl.arange(0, BINS)
    k_bin = tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0)
    k_bin = tl.where(top_k > 0, k_bin, BINS)
    count = tl.sum(tl.where(bins < k_bin, counts, 0), axis=0)
    weight = tl.sum(tl.where(bins < k_bin, weights, 0), axis=0)
    return k_bin, count, weight, tl.sum(tl.where(bins == k_bin, weights, 0), axis=0)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def list_scores_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    high_ptr: tl.tensor,
    reach_ptr: tl.tensor,
    bin_weights_ptr: tl.tensor,
    bin_counts_ptr: tl.tensor,
    list_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    LIST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """List the scores of the bins that a cut may lie in: the k-th's, and top-p's for any cut inside that."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        bins = tl.arange(0, BINS)
        bin_weights = tl.load(bin_weights_ptr + row * BINS + bins)
        bin_counts = tl.load(bin_counts_ptr + row * BINS + bins)
        k_bin, _, least, split = _count_bin(bin_weights, bin_counts, top_k, BINS)
        first, last = k_bin, k_bin
        if top_p < 1:
            first = tl.minimum(_weight_bin(bin_weights, least.to(tl.float64) * top_p), k_bin)
            last = tl.minimum(_weight_bin(bin_weights, (least + split).to(tl.float64) * top_p), k_bin)
        # Scores instead of bins: a comparison for a division. A little more than the bins hold is listed.
        top = tl.load(reach_ptr + 2 * row)
        width = tl.load(reach_ptr + 2 * row + 1) / BINS * temperature
        p_low, k_low = top - (last + 1.001) * width, top - (k_bin + 1.001) * width
        p_high = tl.where(top_p < 1, top - (first - 0.001) * width, float("-inf"))
        k_high = tl.where(k_bin < BINS, top - (k_bin - 0.001) * width, float("-inf"))
        lowest = tl.where(k_bin < BINS, k_low, tl.where(top_p < 1, p_low, float("inf")))
        for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
            if tl.load(high_ptr + row * TILES + tile).to(tl.float64) >= lowest:
                ids = tile * TILE + tl.arange(0, TILE)
                scores = load_scores(logits_ptr + row * row_stride, ids, VOCAB)
                exact = scores.to(tl.float64)
                wanted = ((exact >= p_low) & (exact <= p_high)) | ((exact >= k_low) & (exact <= k_high))
                wanted = wanted & (ids < VOCAB)
                count = tl.sum(wanted.to(tl.int32), axis=0)
                if count > 0:
                    place = tl.atomic_add(listed_ptr + row, count, sem="relaxed")
                    place += tl.cumsum(wanted.to(tl.int32), axis=0) - 1
                    tl.store(list_ptr + row * LIST + place, scores, mask=wanted & (place < LIST))


@triton.jit
def _above(
    held: tl.tuple,
    row: tl.tuple,
    place: tl.tensor,
    key: tl.tensor,
    WEIGHED: tl.constexpr,
    LISTED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
) -> tl.tensor:
    """Weight, or number, of the scores above ``key`` in bin ``place``: of those held, or of the whole row."""
    row_ptr, top, temperature, reach = row
    total = tl.zeros([], dtype=tl.int64)
    if LISTED:
        keys, weights, bins = held
        inside = (bins == place) & (keys > key)
        if WEIGHED:
            total = tl.sum(tl.where(inside, weights, 0), axis=0)
        else:
            total = tl.sum(inside.to(tl.int32), axis=0).to(tl.int64)
    else:
        for start in range(0, VOCAB, TILE):
            scores = load_scores(row_ptr, start + tl.arange(0, TILE), VOCAB)
            inside = (_bins(scores, top, temperature, reach, BINS) == place) & (key_of(scores) > key)
            if WEIGHED:
                total += tl.sum(tl.where(inside, weights_of(scores, top, temperature), 0), axis=0)
            else:
                total += tl.sum(inside.to(tl.int32), axis=0)
    return total


@triton.jit
def _ends(
    held: tl.tuple,
    row: tl.tuple,
    place: tl.tensor,
    LISTED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Lowest and highest key of bin ``place``."""
    row_ptr, top, temperature, reach = row
    low = tl.full([], INT32_MAX, dtype=tl.int32)
    high = -low
    if LISTED:
        keys, _, bins = held
        low = tl.min(tl.where(bins == place, keys, low), axis=0)
        high = tl.max(tl.where(bins == place, keys, high), axis=0)
    else:
        for start in range(0, VOCAB, TILE):
            scores = load_scores(row_ptr, start + tl.arange(0, TILE), VOCAB)
            inside = _bins(scores, top, temperature, reach, BINS) == place
            keys = key_of(scores)
            low = tl.minimum(low, tl.min(tl.where(inside, keys, INT32_MAX), axis=0))
            high = tl.maximum(high, tl.max(tl.where(inside, keys, -INT32_MAX), axis=0))
    return low, high


@triton.jit
def _lowest_kept(
    held: tl.tuple,
    row: tl.tuple,
    place: tl.tensor,
    floor: tl.tensor,
    base: tl.tensor,
    limit: tl.tensor,
    WEIGHED: tl.constexpr,
    LISTED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
) -> tl.tensor:
    """The lowest key of a bin, ``floor`` at least, above which weight or number are still below ``limit``."""
    low, high = _ends(held, row, place, LISTED, VOCAB, TILE, BINS)
    low = tl.maximum(low, floor)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # no overflow
        above = base + _above(held, row, place, middle, WEIGHED, LISTED, VOCAB, TILE, BINS)
        if above.to(tl.float64) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _kept_equals(above: tl.tensor, weight: tl.tensor, equals: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """How many of ``equals`` tokens of one weight stay: those before which less than ``limit`` lies."""
    low, high = tl.zeros([], dtype=tl.int64), equals
    while low < high:
        middle = (low + high) >> 1
        if (above + middle * weight).to(tl.float64) < limit:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _cut(
    held: tl.tuple,
    row: tl.tuple,
    bin_weights: tl.tensor,
    bin_counts: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    LISTED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Key of the cut, and how many tokens of that score stay: top-k first, then top-p of what it left."""
    k_bin, count, total, _ = _count_bin(bin_weights, bin_counts, top_k, BINS)
    cut = tl.full([], LEAST_KEY, dtype=tl.int32)
    kept = tl.full([], VOCAB, dtype=tl.int64)
    if k_bin < BINS:
        wanted = (top_k - count).to(tl.float64)
        zero = tl.zeros([], dtype=tl.int64)
        cut = _lowest_kept(held, row, k_bin, cut, zero, wanted, False, LISTED, VOCAB, TILE, BINS)
        if top_p < 1:
            total += _above(held, row, k_bin, cut - 1, True, LISTED, VOCAB, TILE, BINS)
    if top_p < 1:
        limit = total.to(tl.float64) * top_p
        p_bin = tl.minimum(_weight_bin(bin_weights, limit), k_bin)
        base = tl.sum(tl.where(tl.arange(0, BINS) < p_bin, bin_weights, 0), axis=0)
        cut = _lowest_kept(held, row, p_bin, cut, base, limit, True, LISTED, VOCAB, TILE, BINS)
        base += _above(held, row, p_bin, cut, True, LISTED, VOCAB, TILE, BINS)
        equals = _above(held, row, p_bin, cut - 1, False, LISTED, VOCAB, TILE, BINS)
        equals -= _above(held, row, p_bin, cut, False, LISTED, VOCAB, TILE, BINS)
        kept = _kept_equals(base, weights_of(value_of(cut), row[1], row[2]), equals, limit)
    return cut, kept


@triton.jit(do_not_specialize_on_alignment=PLACES)
def find_cut_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    reach_ptr: tl.tensor,
    bin_weights_ptr: tl.tensor,
    bin_counts_ptr: tl.tensor,
    list_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    LIST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program: the score at which it is cut, and how many of that score stay."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + place)
    top_k = tl.load(top_k_ptr + place)
    top_p = tl.load(top_p_ptr + place)
    score = tl.full([], float("-inf"), dtype=tl.float32)
    kept = tl.zeros([], dtype=tl.int64)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        top = tl.load(reach_ptr + 2 * place)
        reach = tl.load(reach_ptr + 2 * place + 1)
        row = (logits_ptr + place * row_stride, top, temperature, reach)
        bins = tl.arange(0, BINS)
        bin_weights = tl.load(bin_weights_ptr + place * BINS + bins)
        bin_counts = tl.load(bin_counts_ptr + place * BINS + bins)
        listed = tl.load(listed_ptr + place)
        slots = tl.arange(0, LIST)
        scores = tl.load(list_ptr + place * LIST + slots, mask=slots < listed, other=float("-inf"))
        held = (
            key_of(scores),
            weights_of(scores, top, temperature),
            _bins(scores, top, temperature, reach, BINS),
        )
        if listed <= LIST:
            cut, kept = _cut(held, row, bin_weights, bin_counts, top_k, top_p, True, VOCAB, TILE, BINS)
        else:
            cut, kept = _cut(held, row, bin_weights, bin_counts, top_k, top_p, False, VOCAB, TILE, BINS)
        score = value_of(cut)
    tl.store(cut_ptr + place, score)
    tl.store(kept_ptr + place, kept)
