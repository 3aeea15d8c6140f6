"""Where top-k and top-p cut a row, without sorting it.

Owns the selection: a histogram of a row's scores over the distance from its highest one, with exact counts
and exact integer weights, says in which bins the cuts lie; the scores of those bins are gathered, and a
bisection over them finds the cut. A cut is a score, the number of its equals that stay (lowest ids first) and
their weight. All sums are of integers, so no order of programs changes them. Knows no draw.

Bins that hold more scores than the list (a row that is almost flat) are bisected over the row itself: the
same cut, slowly.

    bin_scores_kernel, gather_scores_kernel, find_cut_kernel, in that order after tile_tops_kernel
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.overlap import start_next, wait_for_previous
from ingot.kernels.sampling_rows import (
    INT32_MAX,
    bins_of,
    key_of,
    load_scores,
    row_range,
    value_of,
    weights_of,
)

LEAST_KEY = tl.constexpr(-0x7F800001)  # of -inf
PLACES = ("temperature_ptr", "top_k_ptr", "top_p_ptr")  # rows of a stack: their alignment varies with B


@triton.jit(do_not_specialize_on_alignment=PLACES)
def bin_scores_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
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
    """Count a row's scores by bin where it has a top-k, and sum their weights where it has a top-p."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    has_k = tl.load(top_k_ptr + row) > 0
    has_p = tl.load(top_p_ptr + row) < 1
    if (temperature > 0) & (has_k | has_p):
        top, scale = row_range(high_ptr, low_ptr, row, temperature, TILES, BLOCK_TILES, BINS)
        for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
            ids = tile * TILE + tl.arange(0, TILE)
            scores = load_scores(logits_ptr + row * row_stride, ids, VOCAB)
            bins = bins_of(scores, top, temperature, scale, BINS)
            if has_k:
                tl.atomic_add(bin_counts_ptr + row * BINS + bins, 1, mask=bins >= 0, sem="relaxed")
            if has_p:
                weights = weights_of(scores, top, temperature)
                tl.atomic_add(bin_weights_ptr + row * BINS + bins, weights, mask=weights > 0, sem="relaxed")


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
def gather_scores_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
    bin_weights_ptr: tl.tensor,
    bin_counts_ptr: tl.tensor,
    list_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
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
        first, last = BINS, -1
        if top_p < 1:
            first = tl.minimum(_weight_bin(bin_weights, least.to(tl.float64) * top_p), k_bin)
            last = tl.minimum(_weight_bin(bin_weights, (least + split).to(tl.float64) * top_p), k_bin)
        top, scale = row_range(high_ptr, low_ptr, row, temperature, TILES, BLOCK_TILES, BINS)
        for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
            ids = tile * TILE + tl.arange(0, TILE)
            scores = load_scores(logits_ptr + row * row_stride, ids, VOCAB)
            found = bins_of(scores, top, temperature, scale, BINS)
            wanted = (found == k_bin) | ((found >= first) & (found <= last))
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
    row_ptr, top, temperature, scale = row
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
            inside = (bins_of(scores, top, temperature, scale, BINS) == place) & (key_of(scores) > key)
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
    row_ptr, top, temperature, scale = row
    low = tl.full([], INT32_MAX, dtype=tl.int32)
    high = -low
    if LISTED:
        keys, _, bins = held
        low = tl.min(tl.where(bins == place, keys, low), axis=0)
        high = tl.max(tl.where(bins == place, keys, high), axis=0)
    else:
        for start in range(0, VOCAB, TILE):
            scores = load_scores(row_ptr, start + tl.arange(0, TILE), VOCAB)
            inside = bins_of(scores, top, temperature, scale, BINS) == place
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
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
    bin_weights_ptr: tl.tensor,
    bin_counts_ptr: tl.tensor,
    list_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
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
        top, scale = row_range(high_ptr, low_ptr, place, temperature, TILES, BLOCK_TILES, BINS)
        row = (logits_ptr + place * row_stride, top, temperature, scale)
        bins = tl.arange(0, BINS)
        bin_weights = tl.load(bin_weights_ptr + place * BINS + bins)
        bin_counts = tl.load(bin_counts_ptr + place * BINS + bins)
        listed = tl.load(listed_ptr + place)
        slots = tl.arange(0, LIST)
        scores = tl.load(list_ptr + place * LIST + slots, mask=slots < listed, other=float("-inf"))
        held = (
            key_of(scores),
            weights_of(scores, top, temperature),
            bins_of(scores, top, temperature, scale, BINS),
        )
        if listed <= LIST:
            cut, kept = _cut(held, row, bin_weights, bin_counts, top_k, top_p, True, VOCAB, TILE, BINS)
        else:
            cut, kept = _cut(held, row, bin_weights, bin_counts, top_k, top_p, False, VOCAB, TILE, BINS)
        score = value_of(cut)
    tl.store(cut_ptr + place, score)
    tl.store(kept_ptr + place, kept)
