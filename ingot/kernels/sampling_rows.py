"""What every sampling kernel shares: scores, integer weights, score bins, random numbers.

Owns how a logit becomes a score, a score a weight and a bin, and what the first pass leaves of a row: for
each tile of TILE logits the best key and its id, the highest and the lowest score. Knows no filter, no draw.

    top, scale = row_range(high_ptr, low_ptr, row, temperature, TILES, BLOCK_TILES, BINS)
    weights = weights_of(scores, top, temperature)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.overlap import start_next, wait_for_previous

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INT32_MAX = tl.constexpr(2**31 - 1)
WEIGHT_ONE = tl.constexpr(2.0**40)
FARTHEST = tl.constexpr(28.0)  # exp(-28) 2**40 < 1: what lies farther below the top weighs nothing
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def key_of(values: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats; both zeros are one, NaN is the largest."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & INT32_MAX)
    return tl.where(values != values, INT32_MAX, keys)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """The float32 that has this key."""
    return (key ^ ((key >> 31) & INT32_MAX)).to(tl.float32, bitcast=True)


@triton.jit
def score_of(values: tl.tensor) -> tl.tensor:
    """A logit as filters see it: NaN is impossible, +inf is the largest number."""
    return tl.where(values != values, float("-inf"), tl.minimum(values, FLOAT32_MAX))


@triton.jit
def load_scores(row_ptr: tl.tensor, ids: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """Scores of these ids, -inf beyond the vocabulary."""
    return score_of(tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32))


@triton.jit
def row_range(
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BINS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A row's highest score, and the bins that a unit of distance below it takes; both float64."""
    tiles = tl.arange(0, BLOCK_TILES)
    high = tl.load(high_ptr + row * TILES + tiles, mask=tiles < TILES, other=float("-inf"))
    low = tl.load(low_ptr + row * TILES + tiles, mask=tiles < TILES, other=float("inf"))
    top = tl.maximum(tl.max(high, axis=0), -FLOAT32_MAX).to(tl.float64)
    reach = (top - tl.min(low, axis=0).to(tl.float64)) / temperature
    return top, BINS / tl.minimum(tl.maximum(reach, 1e-30), FARTHEST)


@triton.jit
def weights_of(scores: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """floor(2**40 exp((score - top) / temperature)), int64: the twin's operations in the twin's order."""
    return (tl.exp((scores.to(tl.float64) - top) / temperature) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def bins_of(
    scores: tl.tensor, top: tl.tensor, temperature: tl.tensor, scale: tl.tensor, BINS: tl.constexpr
) -> tl.tensor:
    """Bin 0 holds the highest scores; -1 where a score is too low to weigh anything."""
    distance = -((scores.to(tl.float64) - top) / temperature)  # the quotient that weights_of takes
    near = distance <= FARTHEST
    bins = tl.minimum((tl.where(near, distance, 0.0) * scale).to(tl.int32), BINS - 1)
    return tl.where(near, bins, -1)


@triton.jit
def _splitmix64(state: tl.tensor) -> tl.tensor:
    z = state + GAMMA
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def uniform_of(seed: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Number ``step`` of the stream of ``seed``: float64 in [0, 1), as the runtime's ``uniform``."""
    state = _splitmix64(seed.to(tl.uint64, bitcast=True)) + step.to(tl.uint64, bitcast=True) * GAMMA
    return (_splitmix64(state) >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def tile_tops_kernel(
    logits_ptr: tl.tensor,
    key_ptr: tl.tensor,
    id_ptr: tl.tensor,
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
    bin_weights_ptr: tl.tensor,
    bin_counts_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Each tile's best token; for draws its range of scores; for filters, bins and counter are cleared."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < VOCAB
        values = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
        keys = key_of(values)
        best = tl.max(keys, axis=0)
        tl.store(key_ptr + row * TILES + tile, best)
        tl.store(id_ptr + row * TILES + tile, tl.min(tl.where(keys == best, ids, INT32_MAX), axis=0))
        if high_ptr is not None:
            scores = score_of(values)
            tl.store(high_ptr + row * TILES + tile, tl.max(scores, axis=0))
            low = tl.min(tl.where(scores > float("-inf"), scores, float("inf")), axis=0)
            tl.store(low_ptr + row * TILES + tile, low)
        if bin_weights_ptr is not None:  # noqa: SIM102 - one condition is known when compiling
            if tile == 0:
                bins = tl.arange(0, BINS)
                tl.store(bin_weights_ptr + row * BINS + bins, tl.zeros([BINS], dtype=tl.int64))
                tl.store(bin_counts_ptr + row * BINS + bins, tl.zeros([BINS], dtype=tl.int32))
                tl.store(listed_ptr + row, 0)


@triton.jit
def best_token(
    key_ptr: tl.tensor, id_ptr: tl.tensor, row: tl.tensor, TILES: tl.constexpr, BLOCK_TILES: tl.constexpr
) -> tl.tensor:
    """The lowest id among a row's highest logits; NaN is above all."""
    tiles = tl.arange(0, BLOCK_TILES)
    inside = tiles < TILES
    keys = tl.load(key_ptr + row * TILES + tiles, mask=inside, other=-INT32_MAX - 1)
    ids = tl.load(id_ptr + row * TILES + tiles, mask=inside, other=INT32_MAX)
    return tl.min(tl.where(keys == tl.max(keys, axis=0), ids, INT32_MAX), axis=0)


@triton.jit
def best_token_kernel(
    logits_ptr: tl.tensor,
    key_ptr: tl.tensor,
    id_ptr: tl.tensor,
    token_ptr: tl.tensor,
    value_ptr: tl.tensor,
    row_stride: tl.tensor,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program: the best of its tiles, and that token's logit."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    token = best_token(key_ptr, id_ptr, row, TILES, BLOCK_TILES)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(value_ptr + row, tl.load(logits_ptr + row * row_stride + token).to(tl.float32))
