"""Tiles of products in 8 bits by rows and shape: the rules beside tile_tables.py.

tiles = small_int8_tiles(num_tokens, outputs, width, device)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ingot.kernels.kernel_checks import multiprocessors, next_power_of_two
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.tiles.product_tiles import MAX_ROWS, has_descriptors, shared_bytes
from ingot.kernels.tiles.tile_tables import Tiles, chosen, listed

WARPGROUP_ROWS = 16  # the fewest that the compiler gives a warpgroup; a warp turns e4m3 into fp16 first
INT8_FRAGMENT_ROWS = 16  # up to so many, a weight of 4 bits inside 8 goes straight into registers
# Decode steps of up to so many rows split the sums of products of few outputs. An estimate: at 256 rows the
# output and down products of a 7B have 64 tiles of 128 x 128 for an H200's 132 multiprocessors, at 512 they
# have 128.
DECODE_ROWS = 256
PARTS = (1, 2, 4, 8)  # of split sums
FEW_PARTS = 32  # with more rows parts are by the kernel of many rows, if there are descriptors
SPLITS_64 = 4  # of up to 64 rows by the kernel of many rows
SLOWER, MOST_RESULTS = 1.25, 128 * 256  # a tile with more results moves its bytes so much slower
BARRIERS = 64  # bytes of descriptors' copies: 8 per stage
SYSTEM_SHARED = 1024  # bytes that the system takes per program
LARGE_NAMES = ("BLOCK_M", "BLOCK_N", "MORE_N", "BLOCK_K", "num_warps", "num_stages", "PIECES", "PROGRAMS")


class Machine(NamedTuple):
    """What tiles of many rows depend on in a GPU: ``early``: whether a kernel can start before the previous
    one ends; ``shared``: bytes of shared memory per program.
    """

    multiprocessors: int
    descriptors: bool
    early: bool
    shared: int


def machine_of(device: torch.device) -> Machine:
    """That of a device."""
    return Machine(multiprocessors(device), has_descriptors(device), overlaps(device), shared_bytes(device))


def small_int8_tiles(
    num_tokens: int,
    outputs: int,
    width: int,
    device: torch.device,
    group: int = 0,
    split: bool = False,
    four_bits: bool = False,
    e4m3: bool = False,
) -> Tiles:
    """Tile choices for up to 64 rows; ``split``: of partial sums; ``four_bits``: the weight has 4 inside
    8. Without early loads of the weight, and of e4m3, tiles have the rows of a warpgroup's product.
    """
    kind, size, parts = "fp8" if e4m3 else "int8", outputs, ""
    if e4m3 and group:
        kind = "fp8_blocks"
    if split:
        size, parts = width, "_parts"
    tiles = {"OVERLAP": 2 if overlaps(device) else 1, "SPLITS": 1, "FRAGMENTS": 0}
    tiles |= chosen(f"{kind}{parts}", num_tokens, size)
    least = WARPGROUP_ROWS if e4m3 or not tiles["PREFETCH"] else 8
    tiles["BLOCK_T"] = columns = max(next_power_of_two(num_tokens), least)
    if four_bits and num_tokens <= INT8_FRAGMENT_ROWS:
        tiles |= chosen(f"int8_straight{parts}", num_tokens, size) | {"PROGRAMS": 0}
    tiles["BLOCK_K"] = whole_steps(tiles, group)["BLOCK_K"]
    room = shared_bytes(device) // ((tiles["BLOCK_N"] + columns) * tiles["BLOCK_K"])
    return tiles | {"num_stages": max(min(tiles["num_stages"], room), 2)}


def whole_steps(choice: Mapping[str, int], group: int) -> Tiles:
    """The choice with the BLOCK_K for groups: a step is a group, and a product is at least 32 deep."""
    return {**choice, "BLOCK_K": max(next_power_of_two(group), 32)} if group else dict(choice)


def tile_outputs(choice: Mapping[str, int]) -> int:
    """Outputs per tile of many rows."""
    return choice["BLOCK_N"] + choice["MORE_N"]


def large_int8_bytes(choice: Mapping[str, int], itemsize: int) -> int:
    """Shared memory of a program of many rows at most, in bytes; ``itemsize``: bytes per result.

    A program that walks tiles needs room for the piece being stored beside the operands of all stages, since
    it loads the next tile's meanwhile; otherwise the memory serves twice.
    """
    operands = (choice["BLOCK_M"] + tile_outputs(choice)) * choice["BLOCK_K"] * choice["num_stages"]
    stored = itemsize * choice["BLOCK_M"] * max(choice["BLOCK_N"] // choice["PIECES"], choice["MORE_N"])
    return BARRIERS + (operands + stored if choice["PROGRAMS"] else max(operands, stored))


def large_int8_fits(choice: Mapping[str, int], itemsize: int, shared: int) -> bool:
    """Whether a multiprocessor has room for PROGRAMS; ``shared``: bytes for one alone."""
    programs = max(choice["PROGRAMS"], 1)
    return large_int8_bytes(choice, itemsize) <= (shared + SYSTEM_SHARED) // programs - SYSTEM_SHARED


def fitted(choice: Mapping[str, int], itemsize: int, shared: int) -> Tiles:
    """The choice with as many stages as there is room for, at least 2."""
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
) -> Tiles:
    """Tile choices of a product of many rows: those expected to end first.

    ``PROGRAMS`` per multiprocessor walk the tiles (0: one program per tile), ``TOGETHER`` tiles of rows share
    a tile of the weight, a tile has ``BLOCK_N`` + ``MORE_N`` outputs and is stored in ``PIECES`` (1 or 2);
    ``TMA``: 1 pointers, 2 descriptors, 4 descriptors if possible; ``SPLITS``: parts of the sums, 1 without
    ``split``; ``OVERLAP`` (launch_overlap.py) up to ``DECODE_ROWS`` rows. ``itemsize``: bytes of a result or
    partial sum. Rows that are not ``aligned`` are read byte by byte, in small tiles.
    """
    return dict(_large(num_tokens, outputs, width, itemsize, machine, group, aligned, split))


@functools.lru_cache(maxsize=4096)
def _large(
    num_tokens: int,
    outputs: int,
    width: int,
    itemsize: int,
    machine: Machine,
    group: int,
    aligned: bool,
    split: bool,
) -> Tiles:
    few, groups = num_tokens <= DECODE_ROWS, "_groups" if group else ""
    common = {
        "TOGETHER": 8,
        "TMA": 4 if machine.descriptors and aligned else 1,
        "OVERLAP": 2 if machine.early and few else 1,
    }
    if split and aligned and num_tokens <= MAX_ROWS:
        tiles = common | chosen(f"large_int8_parts{groups}", num_tokens, width) | {"SPLITS": SPLITS_64}
        return fitted(whole_steps(tiles, group), itemsize, machine.shared)
    lines = listed(f"large_int8{groups}")
    found: list[tuple[float, Tiles]] = []
    for line in lines if aligned else lines[-1:]:
        rate, last = line.pop("RATE"), line is lines[-1]
        tiles = whole_steps(common | line, group)
        if (tiles["PROGRAMS"] > 1 and (few or not machine.descriptors)) or (split and tiles["MORE_N"]):
            continue
        tiles = fitted(tiles | ({"PROGRAMS": 0} if split else {}), itemsize, machine.shared)
        if not large_int8_fits(tiles, itemsize, machine.shared) and not last:
            continue
        for splits in PARTS if split else (1,):
            choice = tiles | {"SPLITS": splits}
            if few:
                found.append((busiest_bytes(choice, num_tokens, outputs, width, group, machine), choice))
                continue
            count = -(-num_tokens // choice["BLOCK_M"]) * -(-outputs // tile_outputs(choice))
            programs = max(choice["PROGRAMS"], 1)
            rounds = -(-count // (machine.multiprocessors * programs))
            results = (
                rounds * programs * choice["BLOCK_M"] * tile_outputs(choice)
            )  # of the busiest multiprocessor
            found.append((results / rate, choice))
    return min(found, key=lambda pair: pair[0])[1]


def busiest_bytes(
    choice: Mapping[str, int], num_tokens: int, outputs: int, width: int, group: int, machine: Machine
) -> float:
    """Bytes that the busiest multiprocessor moves: its programs' operands, and its share of the parts, which
    are written (estimated to be twice as slow as reading) and read again.

    On an H200 whole products of 128 and 256 rows took 3 µs, and 1 µs per 53 KB of operands per
    multiprocessor, in tiles of any size up to 128 x 256; of 256 x 192 1 µs per 42 KB.
    """
    tiles = -(-num_tokens // choice["BLOCK_M"]) * -(-outputs // tile_outputs(choice))
    span = group or choice["BLOCK_K"]
    columns = -(-width // (span * choice["SPLITS"])) * span
    rows = min(choice["BLOCK_M"], num_tokens) + min(tile_outputs(choice), outputs)
    parts = 3 * 4 * num_tokens * outputs * choice["SPLITS"] if choice["SPLITS"] > 1 else 0
    programs = -(-tiles * choice["SPLITS"] // machine.multiprocessors)
    slower = SLOWER if choice["BLOCK_M"] * tile_outputs(choice) > MOST_RESULTS else 1
    return programs * rows * columns * slower + parts / machine.multiprocessors
