"""Tiles of the product of many rows with a weight of 8 or 4 bits, and up to how many rows it is used.

if rows <= PACKED_ROWS: tiles = packed_tiles(rows, weight, device)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from ingot.kernels.kernel_checks import multiprocessors
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.tiles.product_tiles import Shaped, WeightShape, shared_bytes
from ingot.kernels.tiles.tile_tables import Tiles, chosen
from ingot.kernels.weight.stored_weight import StoredWeight

# More rows are computed by the matrix library with the widened weight: here every 256 rows unpack it again.
# The limit is an estimate from the times of 64 to 256 rows (docs/performance/packed-weights.md).
PACKED_ROWS = 256
SPLIT_OUTPUTS = 16383  # up to here the sums of a whole product are split too, if there are few programs
MAX_SPLITS = 8
REGISTER_FILE = 65536  # registers of 32 bits per multiprocessor
LARGE_BYTES = 227 << 10  # the largest tiles take 224 KB of shared memory; GPUs with less have at least 96 KB


def packed_tiles(
    num_tokens: int, weight: Shaped, device: torch.device, split: bool = False, ordered: bool = False
) -> Tiles:
    """Tile choices by rows, bits and outputs; ``ordered``: x is in the operand's order; with ``split`` as
    many SPLITS of the sums as fill the GPU with programs, by their registers and shared memory.
    """
    return dict(_resolved(num_tokens, WeightShape.of(weight), device, split, ordered))


@functools.lru_cache(maxsize=4096)
def _resolved(
    num_tokens: int, weight: WeightShape, device: torch.device, split: bool, ordered: bool
) -> Tiles:
    large = shared_bytes(device) >= LARGE_BYTES
    table = f"packed_{weight.bits}_bits" if large else "packed_small"
    wanted = None if ordered else lambda tiles: not tiles["DIRECT"]  # words that go through shared memory
    tiles = chosen(table, num_tokens, weight.out_features, wanted)
    held = REGISTER_FILE // (tiles["REGISTERS"] * 32 * tiles["num_warps"])
    columns = 2 * tiles["BLOCK_T"] + (
        0 if tiles["DIRECT"] else tiles["BLOCK_N"] * weight.bits // 8
    )  # in bytes
    stages = columns * tiles["BLOCK_K"] * tiles["num_stages"]
    beside = max(min(held, shared_bytes(device) // stages), 1)
    splits = parts_that_fit(tiles, num_tokens, weight, beside * multiprocessors(device)) if split else 1
    newer = overlaps(device)
    return tiles | {"SPLITS": splits, "PREFETCH": 2, "TMA": 4 if newer else 1, "OVERLAP": 2 if newer else 1}


def packed_splits(num_tokens: int, weight: StoredWeight, device: torch.device, ordered: bool) -> int:
    """The number of partial sums of a product that may be split."""
    return _resolved(num_tokens, WeightShape.of(weight), device, True, ordered)["SPLITS"]


def parts_that_fit(tiles: Mapping[str, int], num_tokens: int, weight: Shaped, room: int) -> int:
    """How many parts of the sums make at most ``room`` programs."""
    programs = -(-num_tokens // tiles["BLOCK_T"]) * -(-weight.out_features // tiles["BLOCK_N"])
    return max(min(room // max(programs, 1), MAX_SPLITS), 1)
