"""Tiles worth trying for the products and the attention of a decode step on an H200.

Owns the lists that ``kernels_decode.py --sweep`` walks through. Knows no kernel.

    for tiles in product_candidates(rows=8): ...
"""

from __future__ import annotations

Tiles = dict[str, int]

# BLOCK_N, BLOCK_K, warps: BLOCK_K = 256 * warps keeps a thread's 16 bytes of a row beside its 16 bytes of x.
VECTOR = [(n, k, k // 256) for k in (512, 1024, 2048) for n in (4, 8, 16)] + [(2, 2048, 8), (32, 512, 2)]
# BLOCK_N, BLOCK_K, warps, stages
MATRIX = [
    (16, 256, 1, 4), (16, 256, 1, 6), (16, 512, 1, 3), (16, 512, 2, 4), (16, 128, 1, 6),
    (32, 128, 1, 4), (32, 128, 2, 6), (32, 256, 2, 3), (32, 256, 2, 4), (32, 256, 4, 4),
    (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4),
    (128, 128, 4, 3), (128, 128, 8, 4),
]  # fmt: skip


def product_candidates(rows: int) -> list[Tiles]:
    """Vector sums for one row, matrix products for any number of rows."""
    found: list[Tiles] = []
    if rows == 1:
        for n, k, warps in VECTOR:
            tiles = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": 1, "num_warps": warps, "num_stages": 1}
            found += [{**tiles, "OVERLAP": 1, "PREFETCH": 1}]
            found += [{**tiles, "OVERLAP": 2, "PREFETCH": p} for p in (1, 2, 4)]
    for n, k, warps, stages in MATRIX:
        tiles = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": 8 if rows <= 8 else 16, "num_warps": warps}
        tiles["num_stages"] = stages
        if rows > 1:
            found += [{**tiles, "OVERLAP": 1, "PREFETCH": 1}]
        found += [{**tiles, "OVERLAP": 2, "PREFETCH": p} for p in (1, 4)]
    return found


def attention_candidates() -> list[Tiles]:
    """Splits and tiles for contexts of some hundred tokens."""
    return [
        {
            "BLOCK_N": n,
            "MIN_SPLIT": split,
            "MAX_SPLITS": 8,
            "OVERLAP": overlap,
            "num_warps": warps,
            "num_stages": 3,
        }
        for n, warps in ((16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8))
        for split in (64, 128, 256)
        for overlap in (1, 2)
    ]
