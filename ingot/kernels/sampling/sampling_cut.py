"""Where top-k and top-p cut a row, without sorting it: a bisection over the scores listed.

Owns the cut: a score, and how many tokens of that score stay (lowest ids first). All sums are of integers, so
no order of the list changes them. Knows no draw, and not how the list was chosen.

Bins that hold more scores than the list (hundreds of thousands of scores that are nearly equal, but not
equal) are bisected over the row itself: the same cut, in milliseconds.

    find_cut_kernel, after bin_scores_kernel and list_scores_kernel
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.overlap import start_next, wait_for_previous
from ingot.kernels.sampling.sampling_bins import (
    PLACES,
    all_listed,
    bins_of,
    count_bin,
    scale_of,
    sum_before,
    weight_bin,
)
from ingot.kernels.sampling.sampling_rows import INT32_MAX, key_of, load_scores, value_of, weights_of

LEAST_KEY = tl.constexpr(-0x7F800001)  # of -inf


@triton.jit
def _held(
    list_ptr: tl.tensor, listed: tl.tensor, row: tl.tuple, WIDTH: tl.constexpr, BINS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys, weights and bins of a row's list, which takes at most WIDTH places."""
    _, top, temperature, lowest, scale = row
    places = tl.arange(0, WIDTH)
    scores = tl.load(list_ptr + places, mask=places < listed, other=float("-inf"))
    return key_of(scores), weights_of(scores, top, temperature), bins_of(scores, top, lowest, scale, BINS)


@triton.jit
def _above(
    held: tl.tuple,
    row: tl.tuple,
    first: tl.tensor,
    last: tl.tensor,
    key: tl.tensor,
    WEIGHED: tl.constexpr,
    LISTED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
) -> tl.tensor:
    """Weight, or number, of the scores above ``key`` in bins ``first`` to ``last``: held, or of the row."""
    row_ptr, top, temperature, lowest, scale = row
    total = tl.zeros([], dtype=tl.int64)
    if LISTED:
        keys, weights, bins = held
        inside = (bins >= first) & (bins <= last) & (keys > key)
        if WEIGHED:
            total = tl.sum(tl.where(inside, weights, 0), axis=0)
        else:
            total = tl.sum(inside.to(tl.int32), axis=0).to(tl.int64)
    else:
        for start in range(0, VOCAB, TILE):
            scores = load_scores(row_ptr, start + tl.arange(0, TILE), VOCAB)
            bins = bins_of(scores, top, lowest, scale, BINS)
            inside = (bins >= first) & (bins <= last) & (key_of(scores) > key)
            if WEIGHED:
                total += tl.sum(tl.where(inside, weights_of(scores, top, temperature), 0), axis=0)
            else:
                total += tl.sum(inside.to(tl.int32), axis=0)
    return total


@triton.jit
def _ends(
    held: tl.tuple,
    row: tl.tuple,
    first: tl.tensor,
    last: tl.tensor,
    LISTED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Lowest and highest key of bins ``first`` to ``last``."""
    row_ptr, top, _, lowest, scale = row
    low = tl.full([], INT32_MAX, dtype=tl.int32)
    high = -low
    if LISTED:
        keys, _, bins = held
        inside = (bins >= first) & (bins <= last)
        low = tl.min(tl.where(inside, keys, low), axis=0)
        high = tl.max(tl.where(inside, keys, high), axis=0)
    else:
        for start in range(0, VOCAB, TILE):
            scores = load_scores(row_ptr, start + tl.arange(0, TILE), VOCAB)
            bins = bins_of(scores, top, lowest, scale, BINS)
            inside = (bins >= first) & (bins <= last)
            keys = key_of(scores)
            low = tl.minimum(low, tl.min(tl.where(inside, keys, INT32_MAX), axis=0))
            high = tl.maximum(high, tl.max(tl.where(inside, keys, -INT32_MAX), axis=0))
    return low, high


@triton.jit
def _lowest_kept(
    held: tl.tuple,
    row: tl.tuple,
    first: tl.tensor,
    last: tl.tensor,
    floor: tl.tensor,
    base: tl.tensor,
    limit: tl.tensor,
    WEIGHED: tl.constexpr,
    LISTED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
) -> tl.tensor:
    """The lowest key of bins, from ``floor`` on, above which weight or number are still below ``limit``."""
    low, high = _ends(held, row, first, last, LISTED, VOCAB, TILE, BINS)
    low = tl.maximum(low, floor)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # no overflow
        above = base + _above(held, row, first, last, middle, WEIGHED, LISTED, VOCAB, TILE, BINS)
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
    histogram: tl.tuple,
    top_k: tl.tensor,
    top_p: tl.tensor,
    LISTED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    LIST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Key of the cut, and how many tokens of that score stay: top-k first, then top-p of what it left."""
    weights_ptr, counts_ptr = histogram
    counts = tl.load(counts_ptr + tl.arange(0, BINS))
    k_bin = count_bin(counts, top_k, BINS)
    cut = tl.full([], LEAST_KEY, dtype=tl.int32)
    kept = tl.full([], VOCAB, dtype=tl.int64)
    base = tl.zeros([], dtype=tl.int64)
    if k_bin < BINS:
        wanted = (top_k - sum_before(counts, k_bin, BINS)).to(tl.float64)
        cut = _lowest_kept(held, row, k_bin, k_bin, cut, base, wanted, False, LISTED, VOCAB, TILE, BINS)
    if top_p < 1:
        first, last = tl.zeros([], dtype=tl.int32), k_bin
        if all_listed(top_k, LIST):
            total = _above(held, row, first, last, cut - 1, True, LISTED, VOCAB, TILE, BINS)
            limit = total.to(tl.float64) * top_p
        else:
            weights = tl.load(weights_ptr + tl.arange(0, BINS))
            total = sum_before(weights, k_bin, BINS)
            if k_bin < BINS:
                total += _above(held, row, k_bin, k_bin, cut - 1, True, LISTED, VOCAB, TILE, BINS)
            limit = total.to(tl.float64) * top_p
            first = tl.minimum(weight_bin(weights, limit), k_bin)
            last = first
            base = sum_before(weights, first, BINS)
        cut = _lowest_kept(held, row, first, last, cut, base, limit, True, LISTED, VOCAB, TILE, BINS)
        base += _above(held, row, first, last, cut, True, LISTED, VOCAB, TILE, BINS)
        equals = _above(held, row, first, last, cut - 1, False, LISTED, VOCAB, TILE, BINS)
        equals -= _above(held, row, first, last, cut, False, LISTED, VOCAB, TILE, BINS)
        kept = _kept_equals(base, weights_of(value_of(cut), row[1], row[2]), equals, limit)
    return cut, kept


@triton.jit(do_not_specialize_on_alignment=PLACES)
def find_cut_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    span_ptr: tl.tensor,
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
    SHORT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program: the score at which it is cut, and how many of that score stay.

    Most lists are short: SHORT of the LIST places hold them, and one score a thread costs one exp.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + place)
    top_k = tl.load(top_k_ptr + place)
    top_p = tl.load(top_p_ptr + place)
    score = tl.full([], float("-inf"), dtype=tl.float32)
    kept = tl.zeros([], dtype=tl.int64)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        top = tl.load(span_ptr + 2 * place)
        lowest = tl.load(span_ptr + 2 * place + 1)
        scale = scale_of(top, lowest, BINS)
        row = (logits_ptr + place * row_stride, top, temperature, lowest, scale)
        histogram = (bin_weights_ptr + place * BINS, bin_counts_ptr + place * BINS)
        listed = tl.load(listed_ptr + place)
        list_ptr += place * LIST
        if listed <= SHORT:
            held = _held(list_ptr, listed, row, SHORT, BINS)
            cut, kept = _cut(held, row, histogram, top_k, top_p, True, VOCAB, TILE, BINS, LIST)
        elif listed <= LIST:
            held = _held(list_ptr, listed, row, LIST, BINS)
            cut, kept = _cut(held, row, histogram, top_k, top_p, True, VOCAB, TILE, BINS, LIST)
        else:
            cut, kept = _cut(row, row, histogram, top_k, top_p, False, VOCAB, TILE, BINS, LIST)
        score = value_of(cut)
    tl.store(cut_ptr + place, score)
    tl.store(kept_ptr + place, kept)
