"""Tiles worth timing for products of few bits on an H200: the default first, all of them fit.

for tiles in small_int8_candidates(default): ...
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.kernel_checks import multiprocessors, next_power_of_two
from ingot.kernels.tiles.int8_tiles import PARTS, fitted, large_int8_fits, whole_steps
from ingot.kernels.tiles.packed_tiles import MAX_SPLITS, packed_tiles, parts_that_fit
from ingot.kernels.tiles.tile_tables import Tiles, each_once, listed, parsed
from ingot.kernels.weight.stored_weight import StoredWeight

MOST_GROUP_RESULTS = 128 * 128  # with groups a tile of more would spill, and there is no MORE_N
TRIED = parsed("""
try_int8 BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
 16: 32 256 2 6 0 1; 64 256 4 4 0 1; 64 256 4 4 3 0; 64 128 4 8 2 1; 128 128 4 5 2 0; 64 512 4 3 2 1
 64: 64 256 4 4 2 0; 128 128 4 5 2 0; 128 256 8 3 1 0; 64 128 4 6 3 0; 128 128 8 4 2 1

try_packed_few_256 BLOCK_N BLOCK_K num_warps num_stages REGISTERS WIDE AHEAD DIRECT  # chunks of 256
any: 64 256 4 3 256 1 0 1; 64 256 4 2 256 1 0 1; 64 256 4 3 128 0 0 1; 128 256 8 3 128 0 0 1;
     128 256 8 3 256 1 0 1; 128 256 8 2 128 0 0 0; 64 256 4 3 128 1 2 0
try_packed_few_128 …
any: 64 128 4 3 128 1 0 1; 64 128 4 4 256 1 0 1; 128 128 8 3 128 1 0 1; 128 128 8 3 128 1 2 1;
     64 256 4 2 256 1 0 1; 64 256 4 3 256 1 0 1; 64 256 4 3 128 1 0 1; 128 256 8 3 256 1 0 1;
     128 256 8 3 128 1 0 1; 64 128 4 4 128 1 2 0

try_packed_many BLOCK_T BLOCK_N BLOCK_K num_warps num_stages REGISTERS WIDE AHEAD DIRECT
any: 128 128 128 8 2 128 0 0 0; 128 128 128 8 4 256 0 0 0; 128 256 128 8 3 256 0 0 0;
     128 64 128 4 2 128 0 0 0; 64 128 128 8 3 128 0 0 0; 64 256 128 8 3 256 0 0 0
try_packed_many_256 …
any: 256 128 128 8 2 256 0 0 0; 256 128 128 8 3 256 0 0 0; 256 64 128 4 2 256 0 0 0
try_packed_many_chunks …
any: 128 128 256 8 2 256 0 0 0; 64 128 256 8 2 128 0 0 0
try_packed_many_ahead …
any: 64 128 128 8 3 128 1 2 0; 128 64 128 4 2 128 0 2 0
try_packed_many_straight_256 …
any: 64 128 256 8 2 256 1 0 1; 128 64 256 4 2 256 1 0 1; 128 128 256 8 2 256 1 0 1
try_packed_many_straight …
any: 64 128 128 8 3 128 1 0 1; 128 64 128 4 3 256 1 0 1; 128 128 128 8 3 256 1 0 1
try_packed_many_straight_large …
any: 256 128 128 8 3 256 1 0 1
try_packed_many_straight_small …
any: 128 128 128 8 3 128 1 0 1
try_packed_many_straight_double …
any: 128 64 256 4 2 256 1 0 1; 128 128 256 8 2 256 1 0 1; 64 128 256 8 2 256 1 0 1

try_large_int8 BLOCK_M BLOCK_N MORE_N BLOCK_K num_warps num_stages PIECES PROGRAMS
any: 128 256 0 128 8 3 2 1; 256 128 0 128 8 3 2 1; 128 128 0 128 8 3 1 1; 128 64 0 128 4 3 1 2;
     64 128 0 128 4 3 1 2
""")


def tried(table: str, rows: int = 0) -> list[Tiles]:
    """All tiles of a table for so many rows."""
    return listed(table, rows, TRIED)


def small_int8_candidates(default: Mapping[str, int]) -> list[Tiles]:
    """What benchmarks try: the default first."""
    return each_once([dict(default), *({**default, **t} for t in tried("try_int8", default["BLOCK_T"]))])


def large_int8_candidates(
    default: Mapping[str, int], itemsize: int, shared: int, group: int = 0, split: bool = False
) -> list[Tiles]:
    """What benchmarks try: the default first; arguments as of :func:`large_int8_tiles`. All fit."""
    wanted = [dict(default)]
    for line in [*listed("large_int8_groups" if group else "large_int8"), *tried("try_large_int8")]:
        line.pop("RATE", None)
        if group and line["BLOCK_M"] * line["BLOCK_N"] > MOST_GROUP_RESULTS:
            continue
        tiles = whole_steps({**default, **line}, group)
        wanted += [tiles | {"PROGRAMS": 0}] if split else [tiles, tiles | {"PROGRAMS": 0}]
    if split:
        wanted += [tiles | {"SPLITS": splits} for tiles in wanted for splits in PARTS]
    else:
        wanted += [{**default, "TOGETHER": 4}, {**default, "TOGETHER": 16}]
    found = [fitted(tiles, itemsize, shared) for tiles in wanted]
    return each_once([tiles for tiles in found if large_int8_fits(tiles, itemsize, shared)])


def packed_candidates(
    num_tokens: int, weight: StoredWeight, device: torch.device, split: bool = False
) -> list[Tiles]:
    """What is worth timing: the default first. Parts of a whole product are added up by PyTorch."""
    default = packed_tiles(num_tokens, weight, device, split, ordered=True)
    few = num_tokens <= 64
    found = [default, default | {"PREFETCH": 0}] if weight.group and not default["DIRECT"] else [default]
    for tiles in _packed_few(num_tokens, weight) if few else _packed_many(num_tokens, weight):
        tiles = default | tiles
        once, twice = (parts_that_fit(tiles, num_tokens, weight, n * multiprocessors(device)) for n in (1, 2))
        splits = {once, twice} if split else {1, 2} if few else {1}
        if split and few:
            splits.add(min(2 * twice, MAX_SPLITS))
        found += [tiles | {"SPLITS": count} for count in sorted(splits)]
    return each_once(found)


def _packed_few(num_tokens: int, weight: StoredWeight) -> list[Tiles]:
    """For up to 64 rows: what hides a step's waits, by itself and together."""
    block = max(next_power_of_two(num_tokens), 16)
    columns = 256 if weight.bits == 4 and weight.group != 32 else 128
    return [{"BLOCK_T": block} | tiles for tiles in tried(f"try_packed_few_{columns}")]


def _packed_many(num_tokens: int, weight: StoredWeight) -> list[Tiles]:
    """For more: words through shared memory, then straight into registers."""
    wide_chunks = weight.bits == 4 and weight.group != 32
    tables = ["many", *(["many_256"] if num_tokens > 128 else []), *(["many_chunks"] if wide_chunks else [])]
    tables.append("many_ahead")
    if wide_chunks:
        tables.append("many_straight_256")
    else:
        tables += ["many_straight", "many_straight_large" if num_tokens > 128 else "many_straight_small"]
        tables.append("many_straight_double")
    return [tiles for table in tables for tiles in tried(f"try_packed_{table}")]
