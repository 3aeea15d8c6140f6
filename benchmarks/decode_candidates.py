"""Tiles worth trying for the products and the attention of a decode step on an H200.

Owns the lists that ``kernels_decode.py --sweep`` walks through. Knows no kernel.

    for tiles in product_candidates("o", rows=8): ...
"""

from __future__ import annotations

Tiles = dict[str, int]

ALL = 512  # programs a multiprocessor: more than any weight has tiles, so one tile a program
# BLOCK_N, BLOCK_K, warps, programs a multiprocessor
WHOLE_ROWS = [
    (2, 4096, 4, 4), (2, 4096, 4, 8), (2, 4096, 8, 4), (4, 4096, 8, 2), (4, 4096, 4, 4), (2, 4096, 8, 2),
    (4, 4096, 16, 2), (4, 4096, 8, ALL), (2, 4096, 8, ALL), (2, 2048, 8, ALL), (8, 512, 2, ALL),
]  # fmt: skip
PARTS_OF_ROWS = [
    (8, 1024, 4, 4), (8, 2048, 8, 2), (4, 1024, 4, 8), (4, 2048, 8, 4), (4, 2048, 8, 2), (2, 2048, 8, 4),
    (8, 1024, 4, ALL), (4, 1024, 4, ALL), (8, 2048, 8, ALL), (16, 2048, 8, ALL),
]  # fmt: skip
# BLOCK_N, BLOCK_K, warps, stages
MATRIX = [
    (16, 512, 1, 3), (16, 512, 2, 4), (16, 256, 2, 6), (16, 1024, 2, 3), (32, 128, 2, 6), (32, 256, 2, 4),
    (32, 256, 4, 4), (32, 256, 2, 5), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (64, 64, 4, 6),
    (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 4, 3), (128, 64, 8, 6),
]  # fmt: skip
# Columns fetched ahead of the wait, so that the head of the weight is some 12 MB.
HEAD_START = {"qkv": 500, "gate_up": 250, "o": 2000, "down": 1500, "head": 100}


def product_candidates(op: str, rows: int) -> list[Tiles]:
    """Vector sums for one row, matrix products for more."""
    found: list[Tiles] = []
    if rows == 1:
        for n, k, warps, programs in PARTS_OF_ROWS if op == "down" else WHOLE_ROWS:
            tiles = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": 1, "num_warps": warps, "num_stages": 1}
            tiles["PROGRAMS"] = programs
            found += [{**tiles, "OVERLAP": 1, "PREFETCH": p} for p in ((1,) if programs == ALL else (1, 2))]
            starts = (2,) if programs == ALL else (2, 4)
            ahead = (1,) if programs == ALL else (1, 2, 4)
            found += [{**tiles, "OVERLAP": start, "PREFETCH": p} for start in starts for p in ahead]
        return found
    for n, k, warps, stages in MATRIX if rows <= 8 else MATRIX[::2]:
        tiles = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": 8 if rows <= 8 else 16, "num_warps": warps}
        tiles |= {"num_stages": stages, "PROGRAMS": ALL}
        ahead = 2
        while (ahead - 1) * k < HEAD_START[op]:
            ahead *= 2
        found += [
            {**tiles, "OVERLAP": o, "PREFETCH": p}
            for o in (1, 2)
            for p in ((1, ahead) if rows <= 8 else (1,))
        ]
    return found


def attention_candidates() -> list[Tiles]:
    """Splits and tiles for contexts of some hundred tokens."""
    shapes = [
        # BLOCK_N, warps, MIN_SPLIT, MAX_SPLITS, stages
        (16, 2, 64, 8, 2), (16, 2, 64, 16, 2), (16, 1, 64, 16, 2), (32, 2, 64, 16, 1), (32, 4, 64, 16, 1),
        (32, 4, 64, 16, 2), (64, 4, 64, 16, 1), (64, 8, 64, 16, 1), (64, 4, 128, 8, 1), (64, 4, 128, 8, 2),
        (32, 2, 32, 32, 1), (32, 4, 128, 8, 2), (128, 8, 128, 8, 1), (16, 2, 128, 8, 2), (16, 4, 64, 16, 1),
    ]  # fmt: skip
    return [
        {"BLOCK_N": n, "MIN_SPLIT": least, "MAX_SPLITS": most, "OVERLAP": overlap, "num_warps": warps,
         "num_stages": stages}
        for n, warps, least, most, stages in shapes
        for overlap in (1, 2, 4)
    ]  # fmt: skip
