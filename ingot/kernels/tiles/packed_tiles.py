"""Tiles of the product of many rows with a weight of 8 or 4 bits, and how many rows are worth it.

Owns the rules beside tile_tables.py, and the limit. Knows no kernel.

    if rows <= PACKED_ROWS: tiles = packed_tiles(rows, weight, device)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from ingot.kernels.kernel_checks import multiprocessors, next_power_of_two
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.tiles.product_tiles import Shaped, WeightShape, shared_bytes
from ingot.kernels.tiles.tile_tables import Tiles, chosen, each_once, listed
from ingot.kernels.weight.stored_weight import StoredWeight

# More rows are the matrix library's, with the widened weight: every 256 rows unpack it again here. The limit
# is an estimate from what 64 to 256 rows take (docs/performance/packed-weights.md).
PACKED_ROWS = 256
SPLIT_OUTPUTS = 16383  # up to here the sums of a whole product are split as well, where programs are few
MAX_SPLITS = 8
REGISTER_FILE = 65536  # of a multiprocessor, in registers of 32 bits
LARGE_BYTES = 227 << 10  # the largest tiles hold 224 KB of shared memory; GPUs of less have 96 KB at least


def packed_tiles(
    num_tokens: int, weight: Shaped, device: torch.device, split: bool = False, ordered: bool = False
) -> Tiles:
    """Tile choices by rows, bits and outputs, with x in the operand's order if ``ordered``; with ``split`` as
    many SPLITS of the sums as fill the GPU with the programs that its registers and shared memory hold at a
    time.
    """
    return dict(_resolved(num_tokens, WeightShape.of(weight), device, split, ordered))


@functools.lru_cache(maxsize=4096)
def _resolved(
    num_tokens: int, weight: WeightShape, device: torch.device, split: bool, ordered: bool
) -> Tiles:
    large = shared_bytes(device) >= LARGE_BYTES
    table = f"packed_{weight.bits}_bits" if large else "packed_small"
    tiles = chosen(table, num_tokens, weight.out_features, None if ordered else _copied)
    held = REGISTER_FILE // (tiles["REGISTERS"] * 32 * tiles["num_warps"])
    beside = max(min(held, shared_bytes(device) // _stage_bytes(tiles, weight.bits)), 1)
    splits = _splits(tiles, num_tokens, weight, beside * multiprocessors(device)) if split else 1
    newer = overlaps(device)
    return tiles | {"SPLITS": splits, "PREFETCH": 2, "TMA": 4 if newer else 1, "OVERLAP": 2 if newer else 1}


def _copied(tiles: Tiles) -> bool:
    """Whether words go through shared memory."""
    return not tiles["DIRECT"]


def packed_splits(num_tokens: int, weight: StoredWeight, device: torch.device, ordered: bool) -> int:
    """In how many parts the sums of a product come that may come in any."""
    return _resolved(num_tokens, WeightShape.of(weight), device, True, ordered)["SPLITS"]


def _stage_bytes(tiles: Mapping[str, int], bits: int) -> int:
    """Shared memory of all stages, of x in 16 bits and of words that go through it."""
    columns = 2 * tiles["BLOCK_T"] + (0 if tiles["DIRECT"] else tiles["BLOCK_N"] * bits // 8)
    return columns * tiles["BLOCK_K"] * tiles["num_stages"]


def _splits(tiles: Mapping[str, int], num_tokens: int, weight: Shaped, room: int) -> int:
    """How many parts of the sums come to ``room`` programs at most."""
    programs = -(-num_tokens // tiles["BLOCK_T"]) * -(-weight.out_features // tiles["BLOCK_N"])
    return max(min(room // max(programs, 1), MAX_SPLITS), 1)


def packed_candidates(
    num_tokens: int, weight: StoredWeight, device: torch.device, split: bool = False
) -> list[Tiles]:
    """What is worth timing: the default first. Parts of a whole product are added up by PyTorch."""
    default = packed_tiles(num_tokens, weight, device, split, ordered=True)
    few = num_tokens <= 64
    found = [default, default | {"PREFETCH": 0}] if weight.group and not default["DIRECT"] else [default]
    for tiles in _few_rows(num_tokens, weight) if few else _many_rows(num_tokens, weight):
        tiles = default | tiles
        once, twice = (_splits(tiles, num_tokens, weight, n * multiprocessors(device)) for n in (1, 2))
        splits = {once, twice} if split else {1, 2} if few else {1}
        if split and few:
            splits.add(min(2 * twice, MAX_SPLITS))
        found += [tiles | {"SPLITS": count} for count in sorted(splits)]
    return each_once(found)


def _few_rows(num_tokens: int, weight: StoredWeight) -> list[Tiles]:
    """For up to 64 rows: what hides a step's waits, by itself and together."""
    block = max(next_power_of_two(num_tokens), 16)
    columns = 256 if weight.bits == 4 and weight.group != 32 else 128
    return [{"BLOCK_T": block} | tiles for tiles in listed(f"try_packed_few_{columns}")]


def _many_rows(num_tokens: int, weight: StoredWeight) -> list[Tiles]:
    """For more: words through shared memory, then straight into registers."""
    wide_chunks = weight.bits == 4 and weight.group != 32
    tables = ["many", *(["many_256"] if num_tokens > 128 else []), *(["many_chunks"] if wide_chunks else [])]
    tables.append("many_ahead")
    if wide_chunks:
        tables.append("many_straight_256")
    else:
        tables += ["many_straight", "many_straight_large" if num_tokens > 128 else "many_straight_small"]
        tables.append("many_straight_double")
    return [tiles for table in tables for tiles in listed(f"try_packed_{table}")]
