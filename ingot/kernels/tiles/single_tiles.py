"""Tiles of decode attention where every head has its own keys, as measured on an H200, and what tuning tries.

tiles = single_tiles(pairs=2 * 32, num_kv_heads=32, head_dim=128, itemsize=2, device=q.device)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.kernel_checks import next_power_of_two
from ingot.kernels.launch_overlap import overlaps

TARGET_PROGRAMS = 264  # two per multiprocessor of an H200, reached by a single long request
MOST_SPLITS = 64
FEW_PAIRS, FEW_PROGRAMS = 64, 512  # requests times heads: one wave of programs of FEW_BYTES
LONE_PAIRS, LONE_PROGRAMS = 48, 1024  # one request: short splits are worth two waves
FEW_BYTES = 1 << 14  # of keys, and of values, held by the two warps of a program
FEW_MERGED = 1 << 12  # values of all splits, held by each warp at the end
WARP_BYTES = 4096  # of keys, and of values, held in registers by one warp
NARROW_PAIRS, NARROW_BYTES = 1024, 2048  # with a cache in 8 bits a warp holds less up to so many pairs
BLOCKS = (16, 64)  # fewest and most tokens per tile


def single_tiles(
    pairs: int, num_kv_heads: int, head_dim: int, itemsize: int, device: torch.device
) -> dict[str, int]:
    """Tile choices for so many requests, rounded up to a power of two, times heads.

    A program is one warp that holds 4 KiB of keys; for few pairs two that hold 16, with more splits. With a
    cache in 8 bits it is always one warp, which except for few pairs loads a tile while it computes another,
    of 2 KiB, for many pairs of 4 and in fewer splits.
    """
    tiles = {"OVERLAP": 4 if overlaps(device) else 1, "num_stages": 1}
    few, many = pairs <= FEW_PAIRS, pairs > NARROW_PAIRS
    if itemsize == 1:
        held = WARP_BYTES if few or many else NARROW_BYTES
        tiles |= {"num_warps": 1, "MIN_SPLIT": 32 if few else 128 if many else 64, "PREFETCH": int(not few)}
        programs = LONE_PROGRAMS if few else TARGET_PROGRAMS // (2 if many else 1)
    else:
        held = FEW_BYTES if few else WARP_BYTES
        tiles |= {"num_warps": 2 if few else 1, "MIN_SPLIT": 64, "PREFETCH": 0}
        programs = TARGET_PROGRAMS if not few else FEW_PROGRAMS if pairs > LONE_PAIRS else LONE_PROGRAMS
    block = _block(held, head_dim, itemsize)
    splits = max(min(programs // (pairs if few else num_kv_heads), MOST_SPLITS), 1)
    if few:
        merged = FEW_MERGED * tiles["num_warps"] // next_power_of_two(head_dim)  # in registers
        return {**tiles, "BLOCK_N": block, "MAX_SPLITS": min(splits, merged)}
    warps = max(block * _row_bytes(head_dim, itemsize) // WARP_BYTES, tiles["num_warps"])
    return {**tiles, "BLOCK_N": block, "MAX_SPLITS": splits, "num_warps": warps}


def single_changes(
    first: Mapping[str, int], head_dim: int, itemsize: int, device: torch.device
) -> list[dict[str, int]]:
    """What tuning tries instead of the default ``first``, nothing first."""
    later = [{"OVERLAP": 2}] if overlaps(device) else []
    wide = {"BLOCK_N": _block(FEW_BYTES, head_dim, itemsize), "num_warps": 2, "MAX_SPLITS": 8}
    fewer = {"MAX_SPLITS": max(first["MAX_SPLITS"] // 2, 1)}
    longer = {"BLOCK_N": max(first["BLOCK_N"], 32), "MIN_SPLIT": 128, **fewer}
    changes = [{}, *later, wide, *({**wide, **late} for late in later), fewer, longer]
    if itemsize > 1:
        return changes
    half = {"BLOCK_N": max(first["BLOCK_N"] // 2, 16)}
    return [*changes, {"PREFETCH": 1 - first["PREFETCH"]}, {**longer, "PREFETCH": 1}, half]


def _row_bytes(head_dim: int, itemsize: int) -> int:
    return next_power_of_two(max(head_dim, 16)) * itemsize


def _block(held: int, head_dim: int, itemsize: int) -> int:
    """Tokens of a tile with so many bytes of keys."""
    return max(min(held // _row_bytes(head_dim, itemsize), BLOCKS[1]), BLOCKS[0])
