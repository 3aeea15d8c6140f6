"""What sampling kernels share: scores, integer weights, random numbers, and the first pass over a row.

The first pass leaves of each tile of TILE logits its best token (key and id in one int64), its highest and
its lowest score.

    top = top_of(of_tiles(high_ptr, row, float("-inf"), TILES, BLOCK_TILES))
    weights = weights_of(scores, top, temperature)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ingot.kernels.launch_overlap import start_next, wait_for_previous

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INT32_MAX = tl.constexpr(2**31 - 1)
LEAST = tl.constexpr(-(2**63))
WEIGHT_ONE = tl.constexpr(2.0**40)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def key_of(values: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats; both zeros are equal, NaN is the largest."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & INT32_MAX)
    return tl.where(values != values, INT32_MAX, keys)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """The float32 of a key."""
    return (key ^ ((key >> 31) & INT32_MAX)).to(tl.float32, bitcast=True)


@triton.jit
def score_of(values: tl.tensor) -> tl.tensor:
    """A logit as filters see it: NaN becomes -inf, +inf the largest float32."""
    return tl.where(values != values, float("-inf"), tl.minimum(values, FLOAT32_MAX))


@triton.jit
def load_scores(row_ptr: tl.tensor, ids: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """Scores of these ids, -inf beyond the vocabulary."""
    return score_of(tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32))


@triton.jit
def of_tiles(
    ptr: tl.tensor, row: tl.tensor, other: tl.tensor, TILES: tl.constexpr, BLOCK_TILES: tl.constexpr
) -> tl.tensor:
    """The values at ``ptr`` of a row's tiles: [BLOCK_TILES], ``other`` from TILES on."""
    tiles = tl.arange(0, BLOCK_TILES)
    return tl.load(ptr + row * TILES + tiles, mask=tiles < TILES, other=other)


@triton.jit
def top_of(high: tl.tensor) -> tl.tensor:
    """A row's highest score, float64, from its tiles' highest; the lowest float32 if all are -inf."""
    return tl.maximum(tl.max(high, axis=0), -FLOAT32_MAX).to(tl.float64)


@triton.jit
def weights_of(scores: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """floor(2**40 exp((score - top) / temperature)), int64, by the reference's operations in its order."""
    return (tl.exp((scores.to(tl.float64) - top) / temperature) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _splitmix64(state: tl.tensor) -> tl.tensor:
    z = state + GAMMA
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def uniform_of(seed: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Random number ``step`` of ``seed``: float64 in [0, 1), equal to the runtime's ``uniform``."""
    state = _splitmix64(seed.to(tl.uint64, bitcast=True)) + step.to(tl.uint64, bitcast=True) * GAMMA
    return (_splitmix64(state) >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def tile_tops_kernel(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
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
    """Each tile's best token and, for draws, its range of scores; for filters clears bins and counter."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < VOCAB
        values = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
        keys = key_of(values)
        best = tl.max(keys, axis=0)
        first = tl.min(tl.where(keys == best, ids, INT32_MAX), axis=0)
        # Of equal keys the lowest id has the largest complement.
        tl.store(best_ptr + row * TILES + tile, (best.to(tl.int64) << 32) | (first ^ INT32_MAX).to(tl.int64))
        if high_ptr is not None:
            scores = score_of(values)
            high = score_of(value_of(best))
            if best == INT32_MAX:
                high = tl.max(scores, axis=0)
            tl.store(high_ptr + row * TILES + tile, high)
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
    best_ptr: tl.tensor, row: tl.tensor, TILES: tl.constexpr, BLOCK_TILES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The lowest id, int64, of a row's highest logit, and that logit; NaN is above all."""
    best = tl.max(of_tiles(best_ptr, row, LEAST, TILES, BLOCK_TILES), axis=0)
    return (best & INT32_MAX) ^ INT32_MAX, value_of((best >> 32).to(tl.int32))
