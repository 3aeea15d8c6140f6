"""Default tiles of the product of many rows with a weight of 8 or 4 bits, and how many rows are worth it.

Owns the table and the limit. Knows no kernel.

    if rows <= PACKED_ROWS: tiles = packed_tiles(rows, weight, device)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ingot.kernels.checks import multiprocessors, next_power_of_two
from ingot.kernels.overlap import overlaps
from ingot.kernels.tiles.product_tiles import shared_bytes
from ingot.kernels.weight.stored_weight import StoredWeight

# More rows are the matrix library's, with the widened weight: every 256 rows unpack it again here. The limit
# is an estimate from what 64 to 256 rows take (docs/performance/packed-weights.md).
PACKED_ROWS = 256
FEW_OUTPUTS = 8192  # of the tiles below: an output or down product
SPLIT_OUTPUTS = 16383  # up to here the sums of a whole product are split as well, where programs are few
MAX_SPLITS = 8
REGISTER_FILE = 65536  # of a multiprocessor, in registers of 32 bits
NAMES = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "REGISTERS", "WIDE", "AHEAD", "DIRECT")
# Measured on an H200 in whole steps of a 7B model, with x in the operand's order where words go straight
# into registers (benchmarks/narrow_variants.py), and without that order alone (benchmarks/packed_matmul.py);
# rows between take the tiles of the next count, more rows those of 256. By bits, for up to so many rows and
# outputs (0: all others): NAMES, of which those with DIRECT are of x in the operand's order.
TILES: dict[int, Sequence[tuple[int, ...]]] = {
    8: [
        (16, 16383, 16, 64, 128, 4, 3, 128, 1, 0, 1),
        (16, 0, 16, 64, 256, 4, 3, 256, 1, 0, 1),
        (32, 16383, 32, 128, 128, 8, 3, 128, 1, 0, 1),
        (32, 0, 32, 64, 256, 4, 2, 256, 1, 0, 1),
        (64, 16383, 64, 64, 256, 4, 3, 256, 1, 0, 1),
        (64, 0, 64, 128, 128, 8, 3, 128, 1, 2, 1),
        (64, 0, 64, 64, 128, 4, 4, 128, 1, 2, 0),
        (128, FEW_OUTPUTS, 128, 128, 128, 8, 3, 256, 1, 0, 1),
        (128, 16383, 128, 128, 128, 8, 4, 256, 0, 0, 0),
        (128, 0, 128, 64, 128, 4, 2, 128, 0, 2, 0),
        (0, FEW_OUTPUTS, 128, 64, 128, 4, 3, 256, 1, 0, 1),
        (0, 16383, 256, 128, 128, 8, 3, 256, 0, 0, 0),
        (0, 0, 128, 64, 128, 4, 3, 256, 1, 0, 1),
        (0, 0, 256, 128, 128, 8, 3, 256, 0, 0, 0),
    ],
    4: [
        (16, FEW_OUTPUTS, 16, 64, 256, 4, 3, 128, 1, 0, 1),
        (16, 16383, 16, 128, 256, 8, 3, 128, 1, 0, 1),
        (16, 0, 16, 64, 256, 4, 2, 256, 1, 0, 1),
        (32, FEW_OUTPUTS, 32, 128, 256, 8, 3, 256, 1, 0, 1),
        (32, 16383, 32, 128, 256, 8, 3, 128, 1, 0, 1),
        (32, 0, 32, 64, 256, 4, 2, 128, 1, 0, 1),
        (64, FEW_OUTPUTS, 64, 64, 256, 4, 3, 256, 1, 0, 1),
        (64, 16383, 64, 64, 256, 4, 3, 256, 1, 0, 1),
        (64, 0, 64, 64, 256, 4, 2, 256, 1, 0, 1),
        (64, 0, 64, 128, 256, 8, 2, 128, 0, 0, 0),
        (128, 16383, 128, 128, 256, 8, 2, 256, 1, 0, 1),
        (128, 16383, 64, 128, 256, 8, 2, 128, 0, 0, 0),
        (128, 0, 128, 64, 128, 4, 2, 128, 0, 2, 0),
        (0, 0, 128, 128, 256, 8, 2, 256, 1, 0, 1),
        (0, FEW_OUTPUTS, 256, 128, 128, 8, 3, 256, 0, 0, 0),
        (0, 0, 128, 64, 128, 4, 2, 128, 0, 0, 0),
    ],
}
# The largest of these hold 224 KB of shared memory. A GPU of less has 96 KB at least for these: not measured.
LARGE_BYTES = 227 << 10
SMALLER = ((64, 0, 64, 128, 128, 8, 3, 128, 0, 0, 0), (0, 0, 128, 128, 128, 8, 3, 256, 0, 0, 0))


# What is worth timing for up to 64 rows: NAMES without BLOCK_T, of chunks of 256 columns and of 128.
FEW_WIDE_CHUNKS = (
    (64, 256, 4, 3, 256, 1, 0, 1),
    (64, 256, 4, 2, 256, 1, 0, 1),
    (64, 256, 4, 3, 128, 0, 0, 1),
    (128, 256, 8, 3, 128, 0, 0, 1),
    (128, 256, 8, 3, 256, 1, 0, 1),
    (128, 256, 8, 2, 128, 0, 0, 0),
    (64, 256, 4, 3, 128, 1, 2, 0),
)
FEW_CHUNKS = (
    (64, 128, 4, 3, 128, 1, 0, 1),
    (64, 128, 4, 4, 256, 1, 0, 1),
    (128, 128, 8, 3, 128, 1, 0, 1),
    (128, 128, 8, 3, 128, 1, 2, 1),
    (64, 256, 4, 2, 256, 1, 0, 1),
    (64, 256, 4, 3, 256, 1, 0, 1),
    (64, 256, 4, 3, 128, 1, 0, 1),
    (128, 256, 8, 3, 256, 1, 0, 1),
    (128, 256, 8, 3, 128, 1, 0, 1),
    (64, 128, 4, 4, 128, 1, 2, 0),
)


def packed_tiles(
    num_tokens: int,
    weight: StoredWeight,
    device: torch.device,
    split: bool = False,
    ordered: bool = False,
) -> dict[str, int]:
    """Tile choices by rows, bits and outputs, with x in the operand's order if ``ordered``; with ``split`` as
    many SPLITS of the sums as fill the GPU with the programs that its registers and shared memory hold at a
    time.
    """
    large = shared_bytes(device) >= LARGE_BYTES
    table = [row for row in TILES[weight.bits] if ordered or not row[-1]] if large else SMALLER
    found = _row(table, num_tokens, weight.out_features)
    tiles = dict(zip(NAMES, found, strict=True))
    held = REGISTER_FILE // (tiles["REGISTERS"] * 32 * tiles["num_warps"])
    beside = max(min(held, shared_bytes(device) // _stage_bytes(tiles, weight.bits)), 1)
    splits = _splits(tiles, num_tokens, weight, beside * multiprocessors(device)) if split else 1
    newer = overlaps(device)
    return tiles | {"SPLITS": splits, "PREFETCH": 2, "TMA": 4 if newer else 1, "OVERLAP": 2 if newer else 1}


def packed_splits(num_tokens: int, weight: StoredWeight, device: torch.device, ordered: bool) -> int:
    """In how many parts the sums of a product come that may come in any."""
    return packed_tiles(num_tokens, weight, device, True, ordered)["SPLITS"]


def _row(table: Sequence[tuple[int, ...]], num_tokens: int, outputs: int) -> tuple[int, ...]:
    """The first tiles for so many rows and outputs."""
    return next(
        row[2:]
        for row in table
        if (num_tokens <= row[0] or row[0] == 0) and (outputs <= row[1] or row[1] == 0)
    )


def _stage_bytes(tiles: Mapping[str, int], bits: int) -> int:
    """Shared memory of all stages, of x in 16 bits and of words that go through it."""
    columns = 2 * tiles["BLOCK_T"] + (0 if tiles["DIRECT"] else tiles["BLOCK_N"] * bits // 8)
    return columns * tiles["BLOCK_K"] * tiles["num_stages"]


def _splits(tiles: Mapping[str, int], num_tokens: int, weight: StoredWeight, room: int) -> int:
    """How many parts of the sums come to ``room`` programs at most."""
    programs = -(-num_tokens // tiles["BLOCK_T"]) * -(-weight.out_features // tiles["BLOCK_N"])
    return max(min(room // max(programs, 1), MAX_SPLITS), 1)


def packed_candidates(
    num_tokens: int, weight: StoredWeight, device: torch.device, split: bool = False
) -> list[dict[str, int]]:
    """What is worth timing: the default first. Parts of a whole product are added up by PyTorch."""
    default = packed_tiles(num_tokens, weight, device, split, ordered=True)
    few = num_tokens <= 64
    found = [default, default | {"PREFETCH": 0}] if weight.group and not default["DIRECT"] else [default]
    for shape in _few_rows(num_tokens, weight) if few else _many_rows(num_tokens, weight):
        tiles = default | dict(zip(NAMES, shape, strict=True))
        once, twice = (_splits(tiles, num_tokens, weight, n * multiprocessors(device)) for n in (1, 2))
        splits = {once, twice} if split else {1, 2} if few else {1}
        if split and few:
            splits.add(min(2 * twice, MAX_SPLITS))
        found += [tiles | {"SPLITS": count} for count in sorted(splits)]
    return [tiles for place, tiles in enumerate(found) if tiles not in found[:place]]


def _few_rows(num_tokens: int, weight: StoredWeight) -> list[tuple[int, ...]]:
    """NAMES for up to 64 rows: what hides a step's waits, by itself and together."""
    block = max(next_power_of_two(num_tokens), 16)
    shapes = FEW_WIDE_CHUNKS if weight.bits == 4 and weight.group != 32 else FEW_CHUNKS
    return [(block, *shape) for shape in shapes]


def _many_rows(num_tokens: int, weight: StoredWeight) -> list[tuple[int, ...]]:
    """NAMES for more."""
    shapes = [(128, 128, 128, 8, 2, 128), (128, 128, 128, 8, 4, 256), (128, 256, 128, 8, 3, 256)]
    shapes += [(128, 64, 128, 4, 2, 128), (64, 128, 128, 8, 3, 128), (64, 256, 128, 8, 3, 256)]
    if num_tokens > 128:
        shapes += [(256, 128, 128, 8, 2, 256), (256, 128, 128, 8, 3, 256), (256, 64, 128, 4, 2, 256)]
    if weight.bits == 4 and weight.group != 32:
        shapes += [(128, 128, 256, 8, 2, 256), (64, 128, 256, 8, 2, 128)]
    ahead = [(64, 128, 128, 8, 3, 128, 1, 2, 0), (128, 64, 128, 4, 2, 128, 0, 2, 0)]
    return [*((*shape, 0, 0, 0) for shape in shapes), *ahead, *_many_rows_straight(num_tokens, weight)]


def _many_rows_straight(num_tokens: int, weight: StoredWeight) -> list[tuple[int, ...]]:
    """NAMES for more, words straight into registers."""
    if weight.bits == 4 and weight.group != 32:
        shapes = [(64, 128, 256, 8, 2, 256), (128, 64, 256, 4, 2, 256), (128, 128, 256, 8, 2, 256)]
    else:
        shapes = [(64, 128, 128, 8, 3, 128), (128, 64, 128, 4, 3, 256), (128, 128, 128, 8, 3, 256)]
        shapes += [(256, 128, 128, 8, 3, 256)] if num_tokens > 128 else [(128, 128, 128, 8, 3, 128)]
        shapes += [(128, 64, 256, 4, 2, 256), (128, 128, 256, 8, 2, 256), (64, 128, 256, 8, 2, 256)]
    return [(*shape, 1, 0, 1) for shape in shapes]
