"""The choice of a token: the best, or the one at which the running sum of weights passes a random number.

Inverse transform sampling over integer weights in id order, on rows that are already cut: a token stays if
its score is above the cut, or equal to it with fewer than ``kept`` equals of lower id, and weighs at least
min_p of the likeliest.

    tile_weights_kernel, then pick_token_kernel
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.launch_overlap import start_next, wait_for_previous
from ingot.kernels.sampling.score_rows import (
    WEIGHT_ONE,
    best_token,
    load_scores,
    of_tiles,
    top_of,
    uniform_of,
    weights_of,
)

PLACES = ("temperature_ptr", "min_p_ptr", "seed_ptr", "step_ptr")  # rows of a stack, as in score_bins.py


@triton.jit(do_not_specialize_on_alignment=PLACES)
def tile_weights_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    high_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    equals_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Per tile the weight of tokens above the cut, and the number of tokens equal to it."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        top = top_of(of_tiles(high_ptr, row, float("-inf"), TILES, BLOCK_TILES))
        floor = (tl.load(min_p_ptr + row) * WEIGHT_ONE).to(tl.int64)
        for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
            ids = tile * TILE + tl.arange(0, TILE)
            total = tl.zeros([], dtype=tl.int64)
            if cut_ptr is None:
                weights = weights_of(load_scores(logits_ptr + row * row_stride, ids, VOCAB), top, temperature)
                total = tl.sum(tl.where(weights >= floor, weights, 0), axis=0)
            else:
                cut = tl.load(cut_ptr + row)
                high = tl.load(high_ptr + row * TILES + tile)
                count = tl.zeros([], dtype=tl.int32)
                if high >= cut:
                    scores = load_scores(logits_ptr + row * row_stride, ids, VOCAB)
                    count = tl.sum(((scores == cut) & (ids < VOCAB)).to(tl.int32), axis=0)
                    if high > cut:
                        weights = weights_of(scores, top, temperature)
                        total = tl.sum(tl.where((scores > cut) & (weights >= floor), weights, 0), axis=0)
                tl.store(equals_ptr + row * TILES + tile, count)
            tl.store(weight_ptr + row * TILES + tile, total)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def pick_token_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    step_ptr: tl.tensor,
    best_ptr: tl.tensor,
    high_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    equals_ptr: tl.tensor,
    token_ptr: tl.tensor,
    value_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program per row: its best token if the temperature is 0 or missing, otherwise the first token, in
    id order, whose running sum of weights passes a random share of the total; and its logit.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    if temperature_ptr is not None and temperature > 0:
        row_ptr = logits_ptr + row * row_stride
        top = top_of(of_tiles(high_ptr, row, float("-inf"), TILES, BLOCK_TILES))
        floor = (tl.load(min_p_ptr + row) * WEIGHT_ONE).to(tl.int64)
        share = uniform_of(tl.load(seed_ptr + row), tl.load(step_ptr + row))
        tiles = tl.arange(0, BLOCK_TILES)
        weights = of_tiles(weight_ptr, row, 0, TILES, BLOCK_TILES)
        if cut_ptr is not None:
            cut = tl.load(cut_ptr + row)
            kept = tl.load(kept_ptr + row)
            equals = of_tiles(equals_ptr, row, 0, TILES, BLOCK_TILES).to(tl.int64)
            before = tl.cumsum(equals, axis=0) - equals
            cut_weight = weights_of(cut, top, temperature)
            cut_weight = tl.where(cut_weight >= floor, cut_weight, 0)
            weights += tl.minimum(tl.maximum(kept - before, 0), equals) * cut_weight
        reached = tl.cumsum(weights, axis=0)
        total = tl.sum(weights, axis=0)
        # Rounding may reach the total; a total of 0 gives target -1 and token 0.
        target = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
        tile = tl.sum((reached <= target).to(tl.int32), axis=0)
        start = tl.sum(tl.where(tiles < tile, weights, 0), axis=0)
        ids = tile * TILE + tl.arange(0, TILE)
        scores = load_scores(row_ptr, ids, VOCAB)
        weights = weights_of(scores, top, temperature)
        stays = weights >= floor
        if cut_ptr is not None:
            same = ((scores == cut) & (ids < VOCAB)).to(tl.int64)
            rank = tl.sum(tl.where(tiles < tile, equals, 0), axis=0) + tl.cumsum(same, axis=0) - same
            stays = stays & ((scores > cut) | ((same > 0) & (rank < kept)))
        reached = start + tl.cumsum(tl.where(stays, weights, 0), axis=0)
        token = (tile * TILE + tl.sum((reached <= target).to(tl.int32), axis=0)).to(tl.int64)
        value = tl.load(row_ptr + token).to(tl.float32)
    else:
        token, value = best_token(best_ptr, row, TILES, BLOCK_TILES)
    tl.store(token_ptr + row, token)
    tl.store(value_ptr + row, value)
