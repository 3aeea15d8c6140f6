"""Tiles worth trying for the products and the attention of a decode step on an H200.

Owns the lists that ``kernels_decode.py --sweep`` walks through. Knows no kernel.

    for tiles in product_candidates("o", rows=8): ...
"""

from __future__ import annotations

Tiles = dict[str, int]

ALL = 512  # programs a multiprocessor: more than any weight has tiles, so one tile a program
# BLOCK_N, BLOCK_K, warps, programs a multiprocessor
WHOLE_ROWS = [
    (1, 4096, 4, 4), (1, 4096, 4, 8), (1, 4096, 8, 4), (2, 4096, 4, 4), (2, 4096, 8, 2), (2, 4096, 8, 4),
    (2, 4096, 8, ALL), (2, 4096, 16, 1), (2, 4096, 16, 2), (4, 4096, 8, 1), (4, 4096, 8, 2),
    (4, 4096, 8, ALL), (4, 4096, 16, 1), (4, 4096, 16, 2), (8, 4096, 16, 1),
]  # fmt: skip
PARTS_OF_ROWS = [
    (2, 2048, 8, 4), (2, 2048, 8, ALL), (4, 2048, 8, 2), (4, 2048, 8, 4), (4, 2048, 8, ALL), (8, 2048, 8, 2),
    (8, 2048, 8, ALL), (4, 1024, 4, 4), (4, 1024, 4, 8), (4, 1024, 4, ALL), (8, 1024, 4, 4),
    (8, 1024, 4, ALL), (8, 512, 2, 8), (8, 512, 2, ALL), (16, 512, 2, 4), (16, 512, 2, ALL),
]  # fmt: skip
# BLOCK_N, BLOCK_K, warps, stages
MATRIX = [
    (16, 512, 1, 3), (16, 128, 1, 6), (16, 256, 2, 6), (16, 512, 2, 4), (32, 128, 2, 6), (32, 256, 2, 4),
    (32, 256, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (128, 128, 4, 3),
    (128, 64, 4, 4),
]  # fmt: skip


def product_candidates(op: str, rows: int) -> list[Tiles]:
    """Vector sums for one row, matrix products for more."""
    found: list[Tiles] = []
    if rows == 1:
        for n, k, warps, programs in PARTS_OF_ROWS if op == "down" else WHOLE_ROWS + PARTS_OF_ROWS[:8:2]:
            tiles = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": 1, "num_warps": warps, "num_stages": 1}
            found += overlapping({**tiles, "PROGRAMS": programs}, (1,) if programs == ALL else (1, 2, 4))
        return found
    for n, k, warps, stages in MATRIX:
        tiles = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": 8 if rows <= 8 else 16, "num_warps": warps}
        found += overlapping({**tiles, "num_stages": stages, "PROGRAMS": ALL}, (1, 4))
    return found


def overlapping(tiles: Tiles, prefetches: tuple[int, ...]) -> list[Tiles]:
    """The tiles alone, and with overlap at these distances of prefetch."""
    return [{**tiles, "OVERLAP": 1, "PREFETCH": 1}] + [
        {**tiles, "OVERLAP": 2, "PREFETCH": p} for p in prefetches
    ]


def attention_candidates() -> list[Tiles]:
    """Splits and tiles for contexts of some hundred tokens."""
    return [
        {"BLOCK_N": n, "MIN_SPLIT": split, "MAX_SPLITS": 8, "OVERLAP": overlap, "num_warps": warps,
         "num_stages": stages}
        for n, warps in ((16, 2), (16, 4), (32, 4), (64, 4), (64, 8))
        for stages in (1, 2, 3)
        for split in (64, 128, 256)
        for overlap in (1, 2, 4)
    ]  # fmt: skip
