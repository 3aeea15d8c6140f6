"""Which scores of a row top-k and top-p may cut at: a histogram, and a list of the few that matter.

First scores are dropped that the tiles' highest scores prove to be below every cut: below the k-th highest of
them top-k lets nothing through; below a distance at which all of V together would weigh less than top-p may
drop, top-p cuts nothing. A histogram of the rest over their distance from the highest, with exact counts and
exact integer weights, shows in which bins the cuts lie, and the scores of these bins are listed. A top-k of
up to half the list needs no weights per bin: all it leaves is listed. All sums are of integers, so the order
of programs does not matter.

    bin_scores_kernel, then list_scores_kernel; before them tile_tops_kernel
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ingot.kernels.launch_overlap import start_next, wait_for_previous
from ingot.kernels.sampling.score_rows import WEIGHT_ONE, load_scores, of_tiles, top_of, weights_of

PLACES = ("temperature_ptr", "top_k_ptr", "top_p_ptr")  # rows of a stack: their alignment varies with B
FARTHEST = tl.constexpr(28.0)  # exp(-28) 2**40 < 1: scores farther below the top weigh nothing
LEAST_SPAN = tl.constexpr(1e-200)  # far below the distance of any two float32
COMPARED_TILES = tl.constexpr(256)  # up to so many are compared with each other,
COMPARED_ONCE = tl.constexpr(16)  # so many at a time


class Filters(NamedTuple):
    """A row's sampling parameters."""

    temperature: tl.tensor
    top_k: tl.tensor
    top_p: tl.tensor


class Span(NamedTuple):
    """A row's highest score, a score below which no cut lies, and bins per unit of score."""

    top: tl.tensor
    lowest: tl.tensor
    scale: tl.tensor


@triton.jit
def load_filters(
    temperature_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor, row: tl.tensor
) -> Filters:
    """The filters of one row."""
    return Filters(tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row))


@triton.jit
def cuts(filters: Filters) -> tl.tensor:
    """Whether a row is cut at all."""
    return (filters.temperature > 0) & ((filters.top_k > 0) | (filters.top_p < 1))


@triton.jit
def _new_span(top: tl.tensor, lowest: tl.tensor, BINS: tl.constexpr) -> Span:
    return Span(top, lowest, BINS / tl.maximum(top - lowest, LEAST_SPAN))


@triton.jit
def load_span(span_ptr: tl.tensor, row: tl.tensor, BINS: tl.constexpr) -> Span:
    """The span that ``bin_scores_kernel`` left of a row."""
    return _new_span(tl.load(span_ptr + 2 * row), tl.load(span_ptr + 2 * row + 1), BINS)


@triton.jit
def bins_of(scores: tl.tensor, span: Span, BINS: tl.constexpr) -> tl.tensor:
    """Bins of scores, 0 for the highest; -1 below every cut."""
    exact = scores.to(tl.float64)
    near = exact >= span.lowest
    bins = (tl.where(near, span.top - exact, 0.0) * span.scale).to(tl.int32)
    return tl.where(near, tl.minimum(bins, BINS - 1), -1)


@triton.jit
def _span(
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
    row: tl.tensor,
    filters: Filters,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BINS: tl.constexpr,
) -> Span:
    """A row's span from its tiles' highest and lowest scores."""
    temperature, top_k, top_p = filters
    high = of_tiles(high_ptr, row, float("-inf"), TILES, BLOCK_TILES)
    low = of_tiles(low_ptr, row, float("inf"), TILES, BLOCK_TILES)
    top = top_of(high)
    lowest = tl.maximum(tl.min(low, axis=0).to(tl.float64), top - FARTHEST * temperature)
    if top_k > 0:
        if BLOCK_TILES <= COMPARED_TILES:
            # The top_k-th of the tiles' highest scores, -inf if there are fewer.
            as_high = tl.zeros([BLOCK_TILES, COMPARED_ONCE], dtype=tl.int32)
            for start in range(0, TILES, COMPARED_ONCE):
                some = start + tl.arange(0, COMPARED_ONCE)
                other = tl.load(high_ptr + row * TILES + some, mask=some < TILES, other=float("-inf"))
                as_high += (other[None, :] >= high[:, None]).to(tl.int32)
            kth = tl.max(tl.where(tl.sum(as_high, axis=1) >= top_k, high, float("-inf")), axis=0)
            lowest = tl.maximum(lowest, kth.to(tl.float64))
    else:
        least = tl.sum(weights_of(high, top, temperature), axis=0).to(tl.float64)
        # All tokens below weigh at most VOCAB exp(-reach), which must be less than 1 - top_p of the total.
        mass = VOCAB * WEIGHT_ONE / ((1.0 - top_p) * tl.maximum(least, 1.0))
        lowest = tl.maximum(lowest, top - (tl.log(mass) + 0.01) * temperature)
    return _new_span(top, tl.minimum(lowest, top), BINS)


@triton.jit
def all_listed(top_k: tl.tensor, LIST: tl.constexpr) -> tl.tensor:
    """Whether all that this top-k leaves fits the list, so that no histogram of weights is needed."""
    return (top_k > 0) & (top_k <= LIST // 2)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def bin_scores_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
    span_ptr: tl.tensor,
    bin_weights_ptr: tl.tensor,
    bin_counts_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    LIST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Count a row's scores by bin if it has a top-k, and sum their weights if it has a top-p and needs them.

    Without a top-k, the weight of scores below every cut, which is part of top-p's total, joins the last bin.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    filters = load_filters(temperature_ptr, top_k_ptr, top_p_ptr, row)
    temperature, top_k, top_p = filters
    if cuts(filters):
        span = _span(high_ptr, low_ptr, row, filters, VOCAB, TILES, BLOCK_TILES, BINS)
        top, lowest, _ = span
        if tl.program_id(0) == 0:
            tl.store(span_ptr + 2 * row, top)
            tl.store(span_ptr + 2 * row + 1, lowest)
        weighed = (top_p < 1) & (all_listed(top_k, LIST) == 0)
        beyond = tl.zeros([], dtype=tl.int64)
        farthest = tl.where(top_k > 0, lowest, top - FARTHEST * temperature)
        for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
            if tl.load(high_ptr + row * TILES + tile).to(tl.float64) >= farthest:
                ids = tile * TILE + tl.arange(0, TILE)
                scores = load_scores(logits_ptr + row * row_stride, ids, VOCAB)
                bins = bins_of(scores, span, BINS)
                place = row * BINS + bins
                if top_k > 0:
                    tl.atomic_add(bin_counts_ptr + place, 1, mask=bins >= 0, sem="relaxed")
                if weighed:
                    weights = weights_of(scores, top, temperature)
                    counted = (bins >= 0) & (weights > 0)
                    tl.atomic_add(bin_weights_ptr + place, weights, mask=counted, sem="relaxed")
                    beyond += tl.sum(tl.where(bins < 0, weights, 0), axis=0)
        if (top_k <= 0) & (beyond > 0):
            tl.atomic_add(bin_weights_ptr + row * BINS + BINS - 1, beyond, sem="relaxed")


@triton.jit
def weight_bin(weights: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """The first bin at whose end the running sum of weights reaches ``limit``."""
    return tl.sum((tl.cumsum(weights, axis=0).to(tl.float64) < limit).to(tl.int32), axis=0)


@triton.jit
def count_bin(counts: tl.tensor, top_k: tl.tensor, BINS: tl.constexpr) -> tl.tensor:
    """The bin of the top_k-th score, BINS if all stay."""
    k_bin = tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0)
    return tl.where(top_k > 0, k_bin, BINS)


@triton.jit
def sum_before(values: tl.tensor, place: tl.tensor, BINS: tl.constexpr) -> tl.tensor:
    """The sum of the bins before ``place``."""
    return tl.sum(tl.where(tl.arange(0, BINS) < place, values, 0), axis=0)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def list_scores_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    high_ptr: tl.tensor,
    span_ptr: tl.tensor,
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
    """List the scores of the bins that may hold a cut: the k-th's, and top-p's for any cut inside that."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    filters = load_filters(temperature_ptr, top_k_ptr, top_p_ptr, row)
    _, top_k, top_p = filters
    if cuts(filters):
        bins = tl.arange(0, BINS)
        k_bin = count_bin(tl.load(bin_counts_ptr + row * BINS + bins), top_k, BINS)
        first, last = k_bin, k_bin
        if top_p < 1:
            first = tl.zeros([], dtype=tl.int32)
            if all_listed(top_k, LIST) == 0:
                weights = tl.load(bin_weights_ptr + row * BINS + bins)
                least, most = sum_before(weights, k_bin, BINS), sum_before(weights, k_bin + 1, BINS)
                first = tl.minimum(weight_bin(weights, least.to(tl.float64) * top_p), k_bin)
                last = tl.minimum(weight_bin(weights, most.to(tl.float64) * top_p), k_bin)
        # Comparing scores instead of bins saves a product; a little more than the bins is listed.
        top, _, scale = load_span(span_ptr, row, BINS)
        width = 1.0 / scale
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
