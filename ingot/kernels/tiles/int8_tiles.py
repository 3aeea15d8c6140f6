"""Default tiles of the products of numbers of 8 bits, by rows and shape, and what benchmarks try.

Owns the tables. Knows no kernel.

    tiles = small_int8_tiles(num_tokens, outputs, width, device)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ingot.kernels.checks import multiprocessors, next_power_of_two
from ingot.kernels.overlap import overlaps
from ingot.kernels.tiles.product_tiles import has_descriptors, shared_bytes

Choices = Sequence[tuple[int, ...]]

# Up to 64 rows. By the columns of x's tile: for weights of up to so many outputs BLOCK_N, BLOCK_K, warps,
# stages, PROGRAMS, PREFETCH (small_linear.py says what these are).
WIDE: Mapping[int, Choices] = {
    8: [(16383, 32, 256, 2, 6, 0, 1), (0, 64, 256, 4, 4, 3, 1)],
    16: [(16383, 64, 256, 4, 5, 2, 0), (0, 64, 256, 4, 4, 3, 0)],
    32: [(16383, 64, 256, 4, 4, 2, 0), (0, 64, 256, 4, 3, 3, 0)],
    64: [(16383, 64, 128, 4, 6, 2, 0), (0, 128, 128, 4, 4, 2, 0)],
}
# The same of split sums, by inputs instead of outputs, with SPLITS.
SPLIT: Mapping[int, Choices] = {
    8: [(8192, 64, 256, 4, 4, 0, 1, 8), (0, 64, 256, 4, 6, 0, 1, 4)],
    16: [(8192, 64, 256, 4, 4, 0, 1, 8), (0, 64, 256, 4, 6, 0, 0, 4)],
    32: [(8192, 64, 256, 4, 4, 0, 0, 8), (0, 64, 256, 4, 4, 0, 0, 4)],
    64: [(8192, 128, 128, 4, 4, 0, 0, 8), (0, 128, 128, 4, 4, 0, 0, 8)],
}
# Up to so many rows products load a weight of 4 bits inside 8 straight into registers, as it is stored. By
# the columns of x's tile and outputs, BLOCK_N, BLOCK_K, warps, FRAGMENTS (1: a warp asks for a chunk at its
# step, 2: for one ahead); of split sums by inputs, with SPLITS. As benchmarks/int8_variants.py found them.
INT8_FRAGMENT_ROWS = 16
FOUR_BITS: Mapping[int, Choices] = {
    8: [(16383, 32, 256, 4, 1), (0, 16, 256, 4, 1)],
    16: [(16383, 32, 256, 4, 1), (0, 32, 256, 2, 1)],
}
FOUR_BITS_SPLIT: Choices = [(8192, 32, 128, 4, 1, 4), (0, 32, 128, 4, 2, 4)]
# More rows. BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, warps, stages, PIECES, PROGRAMS, and the rate expected, in %
# of the second's. A tensor-core product whose sums are whole numbers is waited for where it is issued: the
# compiler lets only sums in fp32 run on. Two programs of one warp group each wait at different times; an H200
# reaches 1380 to 1420 TOPS so, 1200 to 1240 by the second.
LARGE: Choices = [
    (128, 128, 0, 128, 4, 3, 2, 2, 115),
    (128, 256, 0, 128, 8, 4, 2, 1, 100),
    (256, 128, 64, 128, 8, 3, 2, 1, 98),
    (128, 128, 64, 128, 8, 4, 1, 1, 87),
    (128, 128, 0, 128, 8, 4, 1, 1, 83),
    (64, 128, 0, 128, 4, 5, 1, 1, 65),
    (64, 64, 0, 256, 4, 4, 1, 1, 50),
]
# Rows with groups: their sums take registers beside the result's.
LARGE_GROUPS: Choices = [
    (128, 128, 0, 128, 8, 4, 1, 1, 100),
    (64, 128, 0, 128, 4, 5, 1, 1, 85),
    (64, 64, 0, 128, 4, 5, 1, 1, 60),
]
# Decode steps of up to so many rows split the sums of products of few outputs. An estimate: at 256 rows the
# output and down products of a 7B have 64 tiles of 128 x 128 for an H200's 132 multiprocessors, at 512 there
# are 128, which fill it whole.
DECODE_ROWS = 256
PARTS = (1, 2, 4, 8)  # of split sums
# Parts of up to 64 rows by the products of many, which they are beyond FEW_PARTS rows where there are
# descriptors: two programs a multiprocessor.
FEW_PARTS, PARTS_64, SPLITS_64 = 32, (64, 64, 0, 256, 4, 3, 1, 0), 4
PARTS_64_GROUPS = (64, 64, 0, 128, 4, 5, 1, 0)
MOST_GROUP_RESULTS = 128 * 128  # more would spill, and have no sums of their own for MORE_N
SLOWER, MOST_RESULTS = 1.25, 128 * 256  # a tile of more results moves its bytes so much slower
# What benchmarks try besides.
BESIDE: Choices = [
    (128, 256, 0, 128, 8, 3, 2, 1),
    (256, 128, 0, 128, 8, 3, 2, 1),
    (128, 128, 0, 128, 8, 3, 1, 1),
    (128, 64, 0, 128, 4, 3, 1, 2),
    (64, 128, 0, 128, 4, 3, 1, 2),
]
BARRIERS = 64  # bytes, of descriptors' copies: 8 for each stage
SYSTEM_SHARED = 1024  # bytes that each program takes beside its own
LARGE_NAMES = ("BLOCK_M", "BLOCK_N", "MORE_N", "BLOCK_K", "num_warps", "num_stages", "PIECES", "PROGRAMS")


class Machine(NamedTuple):
    """What the tiles of many rows ask of a GPU.

    Attributes:
        multiprocessors: how many there are.
        descriptors: whether operands can come through tensor descriptors.
        early: whether a kernel can start before the one before it ends.
        shared: bytes of shared memory that a program may use.
    """

    multiprocessors: int
    descriptors: bool
    early: bool
    shared: int


def machine_of(device: torch.device) -> Machine:
    """The GPU that a product runs on."""
    return Machine(multiprocessors(device), has_descriptors(device), overlaps(device), shared_bytes(device))


def small_int8_tiles(
    num_tokens: int,
    outputs: int,
    width: int,
    device: torch.device,
    group: int = 0,
    split: bool = False,
    four_bits: bool = False,
) -> dict[str, int]:
    """Tile choices of a product of up to 64 rows; with ``split`` of parts of its sums; ``four_bits``: of a
    weight of 4 bits inside 8.
    """
    columns = max(next_power_of_two(num_tokens), 8)
    size, table = (width, SPLIT) if split else (outputs, WIDE)
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH", "SPLITS")
    tiles = {"BLOCK_T": columns, "OVERLAP": 2 if overlaps(device) else 1, "SPLITS": 1, "FRAGMENTS": 0}
    tiles |= dict(zip(names, _row(table[columns], size)[1:], strict=False))
    if four_bits and num_tokens <= INT8_FRAGMENT_ROWS:
        straight = _row(FOUR_BITS_SPLIT if split else FOUR_BITS[columns], size)
        tiles |= dict(
            zip(("BLOCK_N", "BLOCK_K", "num_warps", "FRAGMENTS", "SPLITS"), straight[1:], strict=False)
        )
        tiles |= {"PROGRAMS": 0}
    tiles["BLOCK_K"] = whole_steps(tiles, group)["BLOCK_K"]
    room = shared_bytes(device) // ((tiles["BLOCK_N"] + columns) * tiles["BLOCK_K"])
    return tiles | {"num_stages": max(min(tiles["num_stages"], room), 2)}


def _row(table: Choices, size: int) -> tuple[int, ...]:
    """The first row of a table that is for this size; 0 stands for any."""
    return next(row for row in table if size <= row[0] or row[0] == 0)


def whole_steps(choice: Mapping[str, int], group: int) -> dict[str, int]:
    """The choice with the BLOCK_K that groups need: a step is a group, and a product's least depth is 32."""
    return {**choice, "BLOCK_K": max(next_power_of_two(group), 32)} if group else dict(choice)


def waiting(choice: Mapping[str, int], temporary: bool) -> dict[str, int]:
    """The choice for a weight that is ``temporary``: a product of few rows asks for its weight before the
    kernel before has ended, and here that is the one that writes it.
    """
    return {**choice, "OVERLAP": 1} if temporary else dict(choice)


def small_int8_candidates(default: Mapping[str, int]) -> list[dict[str, int]]:
    """What benchmarks try: the default first."""
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH")
    if default["BLOCK_T"] <= 16:
        shapes = [
            (32, 256, 2, 6, 0, 1), (64, 256, 4, 4, 0, 1), (64, 256, 4, 4, 3, 0), (64, 128, 4, 8, 2, 1),
            (128, 128, 4, 5, 2, 0), (64, 512, 4, 3, 2, 1),
        ]  # fmt: skip
    else:
        shapes = [
            (64, 256, 4, 4, 2, 0), (128, 128, 4, 5, 2, 0), (128, 256, 8, 3, 1, 0), (64, 128, 4, 6, 3, 0),
            (128, 128, 8, 4, 2, 1),
        ]  # fmt: skip
    found = [dict(default), *({**default, **dict(zip(names, shape, strict=True))} for shape in shapes)]
    return [tiles for place, tiles in enumerate(found) if tiles not in found[:place]]


def tile_outputs(choice: Mapping[str, int]) -> int:
    """Outputs of a tile of many rows."""
    return choice["BLOCK_N"] + choice["MORE_N"]


def large_int8_bytes(choice: Mapping[str, int], itemsize: int) -> int:
    """Shared memory that a program of many rows takes at most, in bytes; ``itemsize``: of a result.

    Beside the operands of all stages lies the piece of a tile that is being stored, in the result's dtype:
    a program that walks tiles asks for the next one's operands meanwhile; else their memory serves twice.
    """
    operands = (choice["BLOCK_M"] + tile_outputs(choice)) * choice["BLOCK_K"] * choice["num_stages"]
    stored = itemsize * choice["BLOCK_M"] * max(choice["BLOCK_N"] // choice["PIECES"], choice["MORE_N"])
    return BARRIERS + (operands + stored if choice["PROGRAMS"] else max(operands, stored))


def large_int8_fits(choice: Mapping[str, int], itemsize: int, shared: int) -> bool:
    """Whether a multiprocessor has room for the programs that shall walk there; ``shared``: of one alone."""
    programs = max(choice["PROGRAMS"], 1)
    return large_int8_bytes(choice, itemsize) <= (shared + SYSTEM_SHARED) // programs - SYSTEM_SHARED


def _fitted(choice: Mapping[str, int], itemsize: int, shared: int) -> dict[str, int]:
    """The choice with no more stages than there is room for; 2 at least."""
    stages = range(choice["num_stages"], 2, -1)
    fits = (n for n in stages if large_int8_fits({**choice, "num_stages": n}, itemsize, shared))
    return {**choice, "num_stages": next(fits, 2)}


def large_int8_tiles(
    num_tokens: int,
    outputs: int,
    width: int,
    itemsize: int,
    machine: Machine,
    group: int = 0,
    aligned: bool = True,
    split: bool = False,
) -> dict[str, int]:
    """Tile choices of a product of many rows: those that are expected to end first.

    ``PROGRAMS`` a multiprocessor walk the tiles (0: one program a tile), ``TOGETHER`` tiles of rows share a
    tile of the weight, a tile has ``BLOCK_N`` and ``MORE_N`` outputs and is stored in ``PIECES`` (1 or 2);
    ``TMA``: 1 pointers, 2 descriptors, 4 descriptors where they can be; ``SPLITS``: parts of the sums, 1
    without ``split``; ``OVERLAP`` (as in overlap.py) up to ``DECODE_ROWS`` rows. ``itemsize``: bytes of a
    result or of a part's sum. Rows that are not ``aligned`` are read byte by byte, in small tiles.
    """
    few = num_tokens <= DECODE_ROWS
    table, found = LARGE_GROUPS if group else LARGE, []
    common = {
        "TOGETHER": 8,
        "TMA": 4 if machine.descriptors and aligned else 1,
        "OVERLAP": 2 if machine.early and few else 1,
    }
    if split and aligned and num_tokens <= max(SPLIT):
        shape = dict(zip(LARGE_NAMES, PARTS_64_GROUPS if group else PARTS_64, strict=True))
        tiles = whole_steps({**common, **shape, "SPLITS": SPLITS_64}, group)
        return _fitted(tiles, itemsize, machine.shared)
    for row in table if aligned else table[-1:]:
        tiles = whole_steps({**common, **dict(zip(LARGE_NAMES, row, strict=False))}, group)
        if (tiles["PROGRAMS"] > 1 and (few or not machine.descriptors)) or (split and tiles["MORE_N"]):
            continue
        tiles = _fitted(tiles | ({"PROGRAMS": 0} if split else {}), itemsize, machine.shared)
        if not large_int8_fits(tiles, itemsize, machine.shared) and row is not table[-1]:
            continue
        for splits in PARTS if split else (1,):
            choice = tiles | {"SPLITS": splits}
            if few:
                found.append((busiest_bytes(choice, num_tokens, outputs, width, group, machine), choice))
            else:
                found.append((_results(choice, num_tokens, outputs, machine) / row[-1], choice))
    return min(found, key=lambda pair: pair[0])[1]


def _results(choice: Mapping[str, int], num_tokens: int, outputs: int, machine: Machine) -> float:
    """Results that the busiest multiprocessor computes."""
    tiles = -(-num_tokens // choice["BLOCK_M"]) * -(-outputs // tile_outputs(choice))
    programs = max(choice["PROGRAMS"], 1)
    rounds = -(-tiles // (machine.multiprocessors * programs))
    return rounds * programs * choice["BLOCK_M"] * tile_outputs(choice)


def busiest_bytes(
    choice: Mapping[str, int], num_tokens: int, outputs: int, width: int, group: int, machine: Machine
) -> float:
    """Bytes that the busiest multiprocessor moves: operands of its programs, and its share of the parts,
    which are written (taken for twice as slow as reading: an estimate) and read again.

    On an H200 whole products of 128 and 256 rows took 3 µs, and one for every 53 KB of operands of a
    multiprocessor, in tiles of any size up to 128 x 256; of 256 x 192 one for every 42.
    """
    tiles = -(-num_tokens // choice["BLOCK_M"]) * -(-outputs // tile_outputs(choice))
    span = group or choice["BLOCK_K"]
    columns = -(-width // (span * choice["SPLITS"])) * span
    rows = min(choice["BLOCK_M"], num_tokens) + min(tile_outputs(choice), outputs)
    parts = 3 * 4 * num_tokens * outputs * choice["SPLITS"] if choice["SPLITS"] > 1 else 0
    programs = -(-tiles * choice["SPLITS"] // machine.multiprocessors)
    slower = SLOWER if choice["BLOCK_M"] * tile_outputs(choice) > MOST_RESULTS else 1
    return programs * rows * columns * slower + parts / machine.multiprocessors


def large_int8_candidates(
    default: Mapping[str, int],
    itemsize: int,
    shared: int,
    group: int = 0,
    split: bool = False,
) -> list[dict[str, int]]:
    """What benchmarks try: the default first; arguments as of :func:`large_int8_tiles`. All fit."""
    wanted = [dict(default)]
    for choice in [*(LARGE_GROUPS if group else LARGE), *BESIDE]:
        tiles = whole_steps({**default, **dict(zip(LARGE_NAMES, choice, strict=False))}, group)
        if group and choice[0] * choice[1] > MOST_GROUP_RESULTS:
            continue
        wanted += [tiles | {"PROGRAMS": 0}] if split else [tiles, tiles | {"PROGRAMS": 0}]
    if split:
        wanted += [tiles | {"SPLITS": splits} for tiles in wanted for splits in PARTS]
    else:
        wanted += [{**default, "TOGETHER": 4}, {**default, "TOGETHER": 16}]
    found = [_fitted(tiles, itemsize, shared) for tiles in wanted]
    found = [tiles for tiles in found if large_int8_fits(tiles, itemsize, shared)]
    return [tiles for place, tiles in enumerate(found) if tiles not in found[:place]]
