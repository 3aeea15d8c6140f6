"""Tiles worth trying for the matrix products of a decode step on an H200.

for tiles in even_candidates("o", rows=8): ...
"""

from __future__ import annotations

Tiles = dict[str, int]

# Equal shares for full waves of programs on an H200's 132 multiprocessors.
# BLOCK_N, BLOCK_K, warps, stages, programs a multiprocessor, PREFETCH, SPLITS
EVEN_FEW = {
    "qkv": [(32, 256, 2, 4, 0, 1), (32, 256, 4, 4, 3, 1), (32, 128, 4, 4, 3, 0), (32, 128, 4, 5, 4, 0),
            (32, 256, 4, 3, 3, 0), (64, 128, 4, 4, 2, 0), (64, 128, 4, 5, 2, 1)],
    "gate_up": [(64, 128, 4, 4, 3, 1), (64, 128, 4, 4, 3, 2), (64, 128, 4, 3, 3, 0), (128, 128, 4, 3, 2, 1),
                (128, 128, 4, 3, 2, 0), (64, 256, 4, 3, 2, 1), (32, 256, 4, 3, 4, 1), (64, 128, 2, 4, 3, 1),
                (64, 256, 4, 2, 3, 1)],
    "head": [(64, 256, 4, 3, 2, 1), (64, 128, 4, 4, 3, 1), (128, 128, 4, 3, 2, 0), (64, 128, 4, 4, 3, 0)],
    "o": [(64, 256, 4, 3, 2, 1, 4), (64, 128, 4, 4, 3, 0, 6), (64, 128, 4, 4, 2, 0, 4),
          (32, 256, 4, 4, 3, 1, 3), (64, 128, 4, 4, 3, 1, 6), (64, 256, 4, 4, 2, 2, 4)],
    "down": [(64, 256, 4, 3, 2, 1, 4), (64, 128, 4, 4, 3, 1, 6), (64, 128, 4, 4, 3, 0, 6),
             (128, 128, 4, 3, 2, 0, 8), (64, 128, 4, 5, 2, 0, 4), (64, 128, 4, 5, 2, 1, 4)],
}  # fmt: skip
EVEN_MANY = {
    "qkv": [(64, 128, 4, 4, 2, 0), (64, 64, 4, 5, 2, 0), (64, 64, 4, 4, 3, 0), (32, 128, 4, 4, 3, 0),
            (32, 128, 4, 4, 3, 1), (128, 64, 4, 5, 1, 0), (128, 64, 8, 5, 1, 0), (32, 128, 2, 6, 2, 0),
            (64, 128, 4, 8, 1, 0)],
    "gate_up": [(128, 64, 4, 4, 2, 0), (256, 64, 8, 5, 1, 0), (64, 128, 4, 3, 3, 0), (64, 64, 4, 4, 3, 0),
                (128, 64, 8, 4, 2, 0), (256, 64, 8, 4, 1, 1), (128, 128, 4, 3, 2, 2), (64, 128, 4, 3, 3, 2),
            (64, 128, 4, 4, 2, 128), (128, 64, 8, 8, 1, 0)],
    "head": [(128, 64, 4, 4, 2, 0), (256, 64, 8, 4, 1, 0), (128, 128, 8, 4, 1, 0), (128, 64, 8, 4, 2, 0)],
    "o": [(128, 64, 4, 4, 2, 0, 8), (128, 64, 8, 5, 1, 0, 4), (64, 128, 4, 3, 2, 0, 4),
          (128, 64, 8, 4, 2, 0, 8), (64, 64, 4, 4, 3, 0, 6), (64, 128, 4, 4, 2, 128, 2)],
    "down": [(128, 64, 4, 4, 2, 0, 8), (128, 64, 8, 5, 1, 0, 4), (128, 64, 8, 4, 2, 0, 8),
             (64, 128, 4, 3, 2, 0, 4), (64, 64, 4, 4, 3, 0, 6), (128, 128, 8, 4, 1, 0, 4)],
}  # fmt: skip

# Vector sums of one row: BLOCK_N, BLOCK_K, warps, programs a multiprocessor.
WHOLE_ROW = [
    (2, 4096, 4, 4),
    (2, 4096, 4, 8),
    (2, 4096, 8, 4),
    (4, 4096, 8, 4),
    (8, 4096, 8, 2),
    (4, 2048, 4, 6),
]
ONE_ROW = dict.fromkeys(("qkv", "o", "gate_up", "head"), WHOLE_ROW) | {
    "down": [(8, 2048, 8, 3), (8, 2048, 4, 3), (4, 2048, 4, 6), (2, 2048, 4, 8), (4, 4096, 8, 3)]
}


def one_row_candidates(op: str) -> list[Tiles]:
    """Other tiles of a product of one row, and a later start of the kernel after it."""
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "PROGRAMS")
    return [{"OVERLAP": 4}, *(dict(zip(names, shape, strict=True)) for shape in ONE_ROW[op])]


def even_candidates(op: str, rows: int) -> list[Tiles]:
    """Equal shares for full waves of programs; one row's own."""
    if rows == 1:
        return one_row_candidates(op)
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH", "SPLITS")
    shapes = (EVEN_FEW if rows <= 16 else EVEN_MANY)[op]
    return [dict(zip(names, shape, strict=False)) for shape in shapes]
