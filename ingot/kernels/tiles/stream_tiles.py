"""The tiles of decode attention over shared keys on an H200, and how many programs share a pair's spans.

Owns the choices that were measured. Knows no kernel.

    stream_tiles(pairs=64, head_dim=128, itemsize=2, device=device)
"""

from __future__ import annotations

import torch

from ingot.kernels.kernel_checks import next_power_of_two
from ingot.kernels.launch_overlap import overlaps

FEW_PAIRS = 32  # requests times key-value heads: a multiprocessor has at most one program, latency counts
MANY_PAIRS = 256  # with more there are several programs a multiprocessor without a split
PROGRAMS, FEW_PROGRAMS = 256, 128  # of a launch with long requests; fewer of the few, which have four warps
TILE_BYTES = 1 << 14  # of keys


def stream_tiles(
    pairs: int, head_dim: int, itemsize: int, device: torch.device, q_itemsize: int | None = None
) -> dict[str, int]:
    """Tiles for an H200 by the number of pairs: requests (their power of two) times key-value heads.

    A tile of 16 KiB, three of keys and values in flight. Few pairs: short spans, more warps a tile, and the
    merge is a launch of its own. Many: smaller tiles, so that more programs fit a multiprocessor. In fp32
    (``q_itemsize``; None: the cache's), whose products the matrix unit does not take, eight warps hold what
    two would spill; and as many hold wide heads of a cache in 8 bits.
    """
    row_bytes = next_power_of_two(max(head_dim, 16)) * itemsize
    block = max(min(TILE_BYTES // row_bytes, 64), 16)
    tiles = {
        "BLOCK_N": block,
        "MAX_SPLITS": 64,
        "MIN_SPLIT": 256,
        "AXIS": 1,
        "MERGE": 2,
        "OVERLAP": 4 if overlaps(device) else 1,
        "num_warps": 2,
        "num_stages": 3,
    }
    if pairs <= FEW_PAIRS:
        tiles |= {"MIN_SPLIT": 128, "AXIS": 2, "MERGE": 1, "num_warps": 4}
    elif pairs > MANY_PAIRS:
        half = max(min(TILE_BYTES // 2 // row_bytes, 64), 16)
        tiles |= {"MIN_SPLIT": 128, "BLOCK_N": half}
    crowded = (itemsize if q_itemsize is None else q_itemsize) == 4 or (itemsize == 1 and head_dim > 128)
    return {**tiles, "num_warps": 8} if crowded else tiles


def pair_programs(pairs: int) -> int:
    """How many programs share the spans of one of so many pairs; changes no bits."""
    return max((FEW_PROGRAMS if pairs <= FEW_PAIRS else PROGRAMS) // max(pairs, 1), 1)
