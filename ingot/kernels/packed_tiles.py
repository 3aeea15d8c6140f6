"""Default tiles of the product of many rows with a weight of 8 or 4 bits, and how many rows are worth it.

Owns the table and the limit. Knows no kernel.

    if MAX_ROWS < rows <= PACKED_ROWS: tiles = packed_tiles(rows, weight, device)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.kernels.matrix_product import multiprocessors
from ingot.kernels.overlap import overlaps
from ingot.kernels.stored_weight import StoredWeight

# More rows are the matrix library's, with the widened weight: every 256 rows unpack it again here.
PACKED_ROWS = 512
MAX_SPLITS = 8
NAMES = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "REGISTERS")
# By bits, up to so many rows: NAMES. Estimates: to be measured by benchmarks/packed_matmul.py. Two programs a
# multiprocessor take turns at unpacking and multiplying where a tile has 128 rows, two groups of warps of one
# program where it has 256.
TILES: dict[int, Sequence[tuple[int, ...]]] = {
    8: [(128, 128, 128, 128, 8, 2, 128), (0, 256, 128, 128, 8, 3, 256)],
    4: [(128, 128, 128, 128, 8, 2, 128), (0, 256, 128, 128, 8, 3, 256)],
}


def packed_tiles(
    num_tokens: int, weight: StoredWeight, device: torch.device, split: bool = False
) -> dict[str, int]:
    """Tile choices by rows and bits; with ``split`` as many SPLITS of the sums as fill the GPU."""
    found = next(row for row in TILES[weight.bits] if num_tokens <= row[0] or row[0] == 0)
    tiles = dict(zip(NAMES, found[1:], strict=True))
    programs = -(-num_tokens // tiles["BLOCK_T"]) * -(-weight.out_features // tiles["BLOCK_N"])
    splits = max(min(multiprocessors(device) // max(programs, 1), MAX_SPLITS), 1) if split else 1
    newer = overlaps(device)
    return tiles | {"SPLITS": splits, "PREFETCH": 2, "TMA": 4 if newer else 1, "OVERLAP": 2 if newer else 1}


def packed_candidates(
    num_tokens: int, weight: StoredWeight, device: torch.device, split: bool = False
) -> list[dict[str, int]]:
    """What is worth timing: the default first."""
    default = packed_tiles(num_tokens, weight, device, split)
    shapes = [(128, 128, 128, 8, 2, 128), (128, 128, 128, 8, 4, 256), (128, 256, 128, 8, 3, 256)]
    shapes += [(128, 64, 128, 4, 2, 128), (64, 128, 128, 8, 3, 128), (64, 256, 128, 8, 3, 256)]
    if num_tokens > 128:
        shapes += [(256, 128, 128, 8, 2, 256), (256, 128, 128, 8, 3, 256), (256, 64, 128, 4, 2, 256)]
    if weight.bits == 4 and weight.group != 32:
        shapes += [(128, 128, 256, 8, 2, 256), (64, 128, 256, 8, 2, 128)]
    found = [default, default | {"PREFETCH": 0}] if weight.group else [default]
    for shape in shapes:
        tiles = default | dict(zip(NAMES, shape, strict=True))
        programs = -(-num_tokens // tiles["BLOCK_T"]) * -(-weight.out_features // tiles["BLOCK_N"])
        whole = max(multiprocessors(device) // programs, 1)
        for splits in sorted({whole, min(2 * whole, MAX_SPLITS)}) if split else (1,):
            found.append(tiles | {"SPLITS": splits})
    return [tiles for place, tiles in enumerate(found) if tiles not in found[:place]]
