"""Tiles of decode attention over shared keys, as measured on an H100 and an H200, and programs per pair.

stream_tiles(pairs=64, head_dim=128, itemsize=2, device=device)
"""

from __future__ import annotations

import torch

from ingot.kernels.kernel_checks import next_power_of_two
from ingot.kernels.launch_overlap import overlaps

FEW_PAIRS = 16  # requests times key-value heads: latency counts
FEW_PAIRS_OTHERS = 32  # of caches in 8 or 32 bits
MANY_PAIRS = 256  # with more there are several programs per multiprocessor without a split
PROGRAMS = 256  # of a launch with long requests
LEAST_SPANS = 4  # of a long request in a large batch
WHOLE_KEYS = 2048  # that are one span, where each pair has one program
FEW_PROGRAMS, FEW_PROGRAMS_OTHERS = 512, 128  # of few pairs: of small programs, and of large ones
TILE_BYTES = 1 << 14  # of keys


def stream_tiles(
    pairs: int, head_dim: int, itemsize: int, device: torch.device, q_itemsize: int | None = None
) -> dict[str, int]:
    """Tiles for a Hopper GPU by pairs: requests, rounded up to a power of two, times key-value heads.

    A tile has 16 KiB, and three of keys and values are in flight. Few pairs: short spans, more warps per
    tile, and a second launch merges; in 16 bits two tiles in flight, so that the next kernel fits beside.
    Otherwise the last program merges; in 16 bits as few spans as fill the GPU, since a span's end and a merge
    read no keys: up to 2048 keys are one span where each pair has one program. Many: smaller tiles, so that
    more programs fit a multiprocessor. In fp32 (``q_itemsize``, by default the cache's), without tensor
    cores, eight warps hold what two would spill, as for wide heads of a cache in 8 bits.
    """
    row_bytes = next_power_of_two(max(head_dim, 16)) * itemsize
    block, half = (max(min(size // row_bytes, 64), 16) for size in (TILE_BYTES, TILE_BYTES // 2))
    tiles = {"BLOCK_N": block, "MAX_SPLITS": 64, "MIN_SPLIT": 256, "AXIS": 1, "MERGE": 2}
    tiles |= {"OVERLAP": 4 if overlaps(device) else 1, "EARLY": 0, "num_warps": 2, "num_stages": 3}
    if itemsize == 2:
        if pairs <= FEW_PAIRS:
            tiles |= {"MIN_SPLIT": 64, "MERGE": 1, "EARLY": 1, "num_warps": 4, "num_stages": 2}
        else:
            most = max(PROGRAMS // pairs, LEAST_SPANS)
            tiles |= {"MAX_SPLITS": most, "BLOCK_N": block if pairs <= MANY_PAIRS else half}
            tiles |= {"MIN_SPLIT": WHOLE_KEYS} if pairs >= PROGRAMS else {}
    elif pairs <= FEW_PAIRS_OTHERS:
        tiles |= {"MIN_SPLIT": 128, "AXIS": 2, "MERGE": 1, "num_warps": 4}
    elif pairs > MANY_PAIRS:
        tiles |= {"MIN_SPLIT": 128, "BLOCK_N": half}
    crowded = (itemsize if q_itemsize is None else q_itemsize) == 4 or (itemsize == 1 and head_dim > 128)
    return {**tiles, "num_warps": 8} if crowded else tiles


def pair_programs(pairs: int, itemsize: int) -> int:
    """Programs that share the spans of one of so many pairs; changes no bit."""
    few, programs = (FEW_PAIRS, FEW_PROGRAMS) if itemsize == 2 else (FEW_PAIRS_OTHERS, FEW_PROGRAMS_OTHERS)
    return max((programs if pairs <= few else PROGRAMS) // max(pairs, 1), 1)
