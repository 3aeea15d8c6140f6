"""Tiles worth trying for the products and the attention of a decode step on an H200.

Owns the lists that ``kernels_decode.py --sweep`` walks through. Knows no kernel.

    for tiles in product_candidates("o", rows=8): ...
"""

from __future__ import annotations

Tiles = dict[str, int]

ALL = 512  # programs a multiprocessor: more than any weight has tiles, so one tile a program
# One row. BLOCK_N, BLOCK_K, warps, programs a multiprocessor
VECTOR = {
    "hidden": [(2, 4096, 4, 4), (2, 4096, 8, 4), (4, 4096, 8, 2), (4, 4096, 4, 4), (2, 4096, 4, 8),
               (4, 4096, 8, ALL), (8, 512, 2, ALL)],
    "down": [(8, 1024, 4, 4), (8, 2048, 8, 2), (4, 2048, 8, 4), (2, 2048, 8, 4), (8, 1024, 4, ALL),
             (8, 2048, 8, ALL)],
    "head": [(4, 4096, 8, ALL), (4, 2048, 8, ALL), (2, 4096, 8, ALL)],
}  # fmt: skip
# More rows. BLOCK_N, BLOCK_K, warps, stages
FEW = {
    "wide": [
        (64, 256, 4, 3),
        (64, 256, 4, 4),
        (64, 128, 4, 4),
        (64, 512, 4, 3),
        (32, 512, 4, 3),
        (128, 128, 4, 3),
        (128, 256, 8, 3),
        (32, 256, 4, 4),
    ],
    "narrow": [
        (64, 256, 4, 3, 4),
        (64, 256, 4, 3, 2),
        (64, 256, 4, 4, 4),
        (128, 128, 4, 3, 8),
        (128, 256, 8, 3, 4),
        (64, 512, 4, 3, 4),
        (32, 512, 4, 3, 1),
        (32, 512, 4, 3, 2),
        (16, 1024, 4, 3, 1),
        (32, 256, 4, 4, 2),
    ],
    "head": [(64, 256, 4, 3), (64, 512, 4, 3), (128, 128, 4, 3), (128, 256, 8, 3), (32, 512, 4, 3)],
}
MANY = {
    "wide": [
        (64, 128, 4, 4),
        (64, 256, 4, 3),
        (64, 256, 4, 4),
        (128, 128, 8, 3),
        (128, 128, 8, 4),
        (128, 128, 4, 3),
        (128, 256, 8, 3),
        (256, 128, 8, 3),
        (256, 64, 8, 4),
        (64, 256, 8, 3),
    ],
    "narrow": [
        (128, 128, 8, 3, 8),
        (128, 128, 8, 3, 4),
        (128, 128, 8, 4, 8),
        (128, 256, 8, 3, 4),
        (128, 256, 8, 3, 8),
        (64, 256, 4, 3, 4),
        (64, 256, 4, 3, 2),
        (256, 128, 8, 3, 8),
        (64, 256, 8, 3, 4),
    ],
    "head": [(128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 3), (256, 128, 8, 3), (64, 256, 4, 3)],
}


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
            (32, 128, 4, 4, 3, 1), (128, 64, 4, 5, 1, 0), (128, 64, 8, 5, 1, 0)],
    "gate_up": [(128, 64, 4, 4, 2, 0), (256, 64, 8, 5, 1, 0), (64, 128, 4, 3, 3, 0), (64, 64, 4, 4, 3, 0),
                (128, 64, 8, 4, 2, 0), (256, 64, 8, 4, 1, 1), (128, 128, 4, 3, 2, 2), (64, 128, 4, 3, 3, 2)],
    "head": [(128, 64, 4, 4, 2, 0), (256, 64, 8, 4, 1, 0), (128, 128, 8, 4, 1, 0), (128, 64, 8, 4, 2, 0)],
    "o": [(128, 64, 4, 4, 2, 0, 8), (128, 64, 8, 5, 1, 0, 4), (64, 128, 4, 3, 2, 0, 4),
          (128, 64, 8, 4, 2, 0, 8), (64, 64, 4, 4, 3, 0, 6)],
    "down": [(128, 64, 4, 4, 2, 0, 8), (128, 64, 8, 5, 1, 0, 4), (128, 64, 8, 4, 2, 0, 8),
             (64, 128, 4, 3, 2, 0, 4), (64, 64, 4, 4, 3, 0, 6), (128, 128, 8, 4, 1, 0, 4)],
}  # fmt: skip


def even_candidates(op: str, rows: int) -> list[Tiles]:
    """Equal shares for full waves of programs."""
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH", "SPLITS")
    shapes = (EVEN_FEW if rows <= 16 else EVEN_MANY)[op]
    return [dict(zip(names, shape, strict=False)) for shape in shapes]


def candidates(op: str, rows: int) -> list[Tiles]:
    """What to try for an op."""
    if op == "attention":
        return attention_candidates()
    if op == "norm":
        return [{"num_warps": warps, "OVERLAP": o} for warps in (4, 8, 16, 32) for o in (1, 2)]
    return vector_candidates(op) if rows == 1 else matrix_candidates(op, rows)


def vector_candidates(op: str) -> list[Tiles]:
    """Few programs that walk the tiles, or a program a tile; alone and overlapping."""
    found = []
    for n, k, warps, programs in VECTOR[op if op in VECTOR else "hidden"]:
        tiles = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": 1, "num_warps": warps, "num_stages": 1}
        starts = (1, 2) if programs == ALL else (1, 2, 4)
        found += [{**tiles, "PROGRAMS": programs, "OVERLAP": start} for start in starts]
    return found


def matrix_candidates(op: str, rows: int) -> list[Tiles]:
    """A program a tile, with and without the next step of x ahead."""
    found = []
    kind = "head" if op == "head" else "narrow" if op in ("o", "down") else "wide"
    columns = max(1 << (rows - 1).bit_length(), 16)
    for n, k, warps, stages, *splits in (FEW if rows <= 16 else MANY)[kind]:
        tiles = {"BLOCK_N": n, "BLOCK_K": k, "BLOCK_T": columns, "num_warps": warps, "num_stages": stages}
        tiles |= {"SPLITS": splits[0]} if splits else {}
        if rows <= 8:
            ways = [(t, 1, o) for t in (8, 16) for o in (2, 4)] + [(16, 2, 2)]
        else:
            ways = [(columns, 1, 2), (columns, 2, 2), (columns, 1, 4)]
        for t, prefetch, overlap in ways:
            if overlap == 4 and kind == "narrow":
                continue
            found.append({**tiles, "BLOCK_T": t, "PREFETCH": prefetch, "OVERLAP": overlap})
    return found


def attention_candidates() -> list[Tiles]:
    """Splits and tiles for contexts of some hundred tokens."""
    shapes = [
        # BLOCK_N, warps, MIN_SPLIT, MAX_SPLITS, stages
        (16, 2, 64, 8, 2), (16, 2, 64, 16, 2), (16, 1, 64, 16, 2), (32, 2, 64, 16, 1), (32, 4, 64, 16, 1),
        (64, 4, 64, 16, 1), (64, 8, 64, 16, 1), (64, 4, 128, 8, 1), (64, 4, 128, 8, 2), (32, 2, 32, 32, 1),
        (32, 4, 128, 8, 2), (128, 8, 128, 8, 1),
    ]  # fmt: skip
    return [
        {"BLOCK_N": n, "MIN_SPLIT": least, "MAX_SPLITS": most, "OVERLAP": overlap, "num_warps": warps,
         "num_stages": stages}
        for n, warps, least, most, stages in shapes
        for overlap in (1, 2, 4)
    ]  # fmt: skip
