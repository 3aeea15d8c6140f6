"""Where top-k and top-p cut a row, without sorting it: a bisection over the listed scores.

The cut is a score, and how many tokens of that score stay (lowest ids first). All sums are of integers, so
the order of the list does not matter. If the bins hold more scores than the list (hundreds of thousands of
nearly equal scores), the row itself is bisected: the same cut, in milliseconds.

    find_cut_kernel, after bin_scores_kernel and list_scores_kernel
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ingot.kernels.launch_overlap import start_next, wait_for_previous
from ingot.kernels.sampling.score_bins import (
    PLACES,
    Filters,
    Span,
    all_listed,
    bins_of,
    count_bin,
    cuts,
    load_filters,
    load_span,
    sum_before,
    weight_bin,
)
from ingot.kernels.sampling.score_rows import INT32_MAX, key_of, load_scores, value_of, weights_of

LEAST_KEY = tl.constexpr(-0x7F800001)  # of -inf


class Row(NamedTuple):
    """A row to be cut: its logits, its filters, and how its scores fall into bins."""

    ptr: tl.tensor
    filters: Filters
    span: Span
    VOCAB: tl.constexpr
    TILE: tl.constexpr
    BINS: tl.constexpr


class Scores(NamedTuple):
    """Some scores of a row as keys, weights and bins."""

    keys: tl.tensor
    weights: tl.tensor
    bins: tl.tensor


@triton.jit
def _scores(row: Row, scores: tl.tensor) -> Scores:
    bins, keys = bins_of(scores, row.span, row.BINS), key_of(scores)
    return Scores(keys, weights_of(scores, row.span.top, row.filters.temperature), bins)


@triton.jit
def _held(list_ptr: tl.tensor, listed: tl.tensor, row: Row, WIDTH: tl.constexpr) -> Scores:
    """A row's list of at most WIDTH scores."""
    places = tl.arange(0, WIDTH)
    return _scores(row, tl.load(list_ptr + places, mask=places < listed, other=float("-inf")))


@triton.jit
def _tile(row: Row, start: tl.tensor) -> Scores:
    """TILE scores of the row itself."""
    return _scores(row, load_scores(row.ptr, start + tl.arange(0, row.TILE), row.VOCAB))


@triton.jit
def _above(
    held: Scores | None, row: Row, first: tl.tensor, last: tl.tensor, key: tl.tensor, WEIGHED: tl.constexpr
) -> tl.tensor:
    """Weight, or number, of the scores above ``key`` in bins ``first`` to ``last``."""
    if held is None:
        total = tl.zeros([], dtype=tl.int64)
        for start in range(0, row.VOCAB, row.TILE):
            total += _above(_tile(row, start), row, first, last, key, WEIGHED)
    else:
        inside = (held.bins >= first) & (held.bins <= last) & (held.keys > key)
        counted = tl.where(inside, held.weights, 0) if WEIGHED else inside.to(tl.int32)
        total = tl.sum(counted, axis=0).to(tl.int64)
    return total


@triton.jit
def _ends(held: Scores | None, row: Row, first: tl.tensor, last: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Lowest and highest key of bins ``first`` to ``last``."""
    if held is None:
        low = tl.full([], INT32_MAX, dtype=tl.int32)
        high = -low
        for start in range(0, row.VOCAB, row.TILE):
            tile_low, tile_high = _ends(_tile(row, start), row, first, last)
            low, high = tl.minimum(low, tile_low), tl.maximum(high, tile_high)
    else:
        inside = (held.bins >= first) & (held.bins <= last)
        low = tl.min(tl.where(inside, held.keys, INT32_MAX), axis=0)
        high = tl.max(tl.where(inside, held.keys, -INT32_MAX), axis=0)
    return low, high


@triton.jit
def _lowest_kept(
    held: Scores | None,
    row: Row,
    first: tl.tensor,
    last: tl.tensor,
    floor: tl.tensor,
    base: tl.tensor,
    limit: tl.tensor,
    WEIGHED: tl.constexpr,
) -> tl.tensor:
    """The lowest key in these bins, at least ``floor``, with weight or number above it below ``limit``."""
    low, high = _ends(held, row, first, last)
    low = tl.maximum(low, floor)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # no overflow
        above = base + _above(held, row, first, last, middle, WEIGHED)
        if above.to(tl.float64) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _kept_equals(above: tl.tensor, weight: tl.tensor, equals: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """How many of ``equals`` tokens of one weight stay: those with less than ``limit`` before them."""
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
    held: Scores | None, row: Row, weights_ptr: tl.tensor, counts_ptr: tl.tensor, LIST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Key of the cut, and how many tokens of that score stay: top-k first, then top-p of what it left."""
    _, top_k, top_p = row.filters
    counts = tl.load(counts_ptr + tl.arange(0, row.BINS))
    k_bin = count_bin(counts, top_k, row.BINS)
    cut = tl.full([], LEAST_KEY, dtype=tl.int32)
    kept = tl.full([], row.VOCAB, dtype=tl.int64)
    base = tl.zeros([], dtype=tl.int64)
    if k_bin < row.BINS:
        wanted = (top_k - sum_before(counts, k_bin, row.BINS)).to(tl.float64)
        cut = _lowest_kept(held, row, k_bin, k_bin, cut, base, wanted, False)
    if top_p < 1:
        first, last = tl.zeros([], dtype=tl.int32), k_bin
        if all_listed(top_k, LIST):
            limit = _above(held, row, first, last, cut - 1, True).to(tl.float64) * top_p
        else:
            weights = tl.load(weights_ptr + tl.arange(0, row.BINS))
            total = sum_before(weights, k_bin, row.BINS)
            if k_bin < row.BINS:
                total += _above(held, row, k_bin, k_bin, cut - 1, True)
            limit = total.to(tl.float64) * top_p
            first = tl.minimum(weight_bin(weights, limit), k_bin)
            last = first
            base = sum_before(weights, first, row.BINS)
        cut = _lowest_kept(held, row, first, last, cut, base, limit, True)
        base += _above(held, row, first, last, cut, True)
        equals = _above(held, row, first, last, cut - 1, False)
        equals -= _above(held, row, first, last, cut, False)
        cut_weight = weights_of(value_of(cut), row.span.top, row.filters.temperature)
        kept = _kept_equals(base, cut_weight, equals, limit)
    return cut, kept


@triton.jit
def _search(
    row: Row,
    list_ptr: tl.tensor,
    listed: tl.tensor,
    weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    LIST: tl.constexpr,
    SHORT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The cut among the listed scores, or in the row itself if they do not fit the list. Most lists are
    short: SHORT of the LIST places hold them, with one exp per thread.
    """
    if listed <= SHORT:
        cut, kept = _cut(_held(list_ptr, listed, row, SHORT), row, weights_ptr, counts_ptr, LIST)
    elif listed <= LIST:
        cut, kept = _cut(_held(list_ptr, listed, row, LIST), row, weights_ptr, counts_ptr, LIST)
    else:
        cut, kept = _cut(None, row, weights_ptr, counts_ptr, LIST)
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
    """One program per row: the score at which it is cut, and how many tokens of that score stay."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    filters = load_filters(temperature_ptr, top_k_ptr, top_p_ptr, place)
    score = tl.full([], float("-inf"), dtype=tl.float32)
    kept = tl.zeros([], dtype=tl.int64)
    if cuts(filters):
        span = load_span(span_ptr, place, BINS)
        cut, kept = _search(
            Row(logits_ptr + place * row_stride, filters, span, VOCAB, TILE, BINS),
            list_ptr + place * LIST,
            tl.load(listed_ptr + place),
            bin_weights_ptr + place * BINS,
            bin_counts_ptr + place * BINS,
            LIST,
            SHORT,
        )
        score = value_of(cut)
    tl.store(cut_ptr + place, score)
    tl.store(kept_ptr + place, kept)
