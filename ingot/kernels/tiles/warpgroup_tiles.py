"""Tiles of products in 8 bits by groups of warps (Hopper), by rows and shape: those expected to end first.

tiles = warpgroup_tiles(num_tokens, outputs, width, 2, machine)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from ingot.kernels.tiles.int8_tiles import DECODE_ROWS, PARTS, SYSTEM_SHARED, Machine
from ingot.kernels.tiles.tile_tables import Tiles, listed

STEP, GROUP_OUTPUTS = 128, 64  # columns of a step, outputs of a group of warps
MOST_STAGES = 12
BARRIERS = 512  # bytes at most, with what the groups of warps are started by
TILES = frozenset(("GROUPS", "BLOCK_T", "PIECE", "PROGRAMS", "TOGETHER", "SPLITS", "OVERLAP", "num_stages"))
# With more rows, or a weight in int8, rows with groups are faster by int8_matmul.py: here each group's sums
# wait for the next one's.
GROUP_ROWS = 128
# Of a weight in blocks, with so many rows in a tile, their scales are kept in shared memory of so many bytes.
KEPT_ROWS, KEPT_BYTES = 32, 24 << 10
# Estimates that choose the fastest of the tiles measured on an H100 (docs/results/int8_warpgroups.json), per
# multiprocessor: bytes per cycle of a step's operands and of parts of sums, cycles in which a tile begins and
# ends.
STEP_BYTES, PART_BYTES, TILE_CYCLES = 60, 10, 3000


def warpgroup_bytes(choice: Mapping[str, int], itemsize: int, four: bool, blocks: bool = False) -> int:
    """Shared memory of a program at most, in bytes; ``itemsize``: bytes per result, ``four``: whether the
    weight has 4 bits inside 8, ``blocks``: whether it is in blocks.
    """
    steps = choice["num_stages"] * step_bytes(choice, four)
    buffers = (2 if choice["BLOCK_T"] > choice["PIECE"] else 1) * choice["GROUPS"]
    pieces = buffers * choice["PIECE"] * GROUP_OUTPUTS * 2 if itemsize == 2 else 0
    kept = KEPT_BYTES if blocks and choice["BLOCK_T"] >= KEPT_ROWS else 0
    return steps + pieces + kept + BARRIERS


def step_bytes(choice: Mapping[str, int], four: bool) -> int:
    """Operands of a step."""
    columns = STEP // 2 if four else STEP
    return choice["BLOCK_T"] * STEP + choice["GROUPS"] * GROUP_OUTPUTS * columns


def fitted(choice: Mapping[str, int], itemsize: int, shared: int, four: bool, blocks: bool = False) -> Tiles:
    """The choice with as many stages as there is room for, up to its own; ``shared``: bytes for one program
    alone.
    """
    room = (shared + SYSTEM_SHARED) // choice["PROGRAMS"] - SYSTEM_SHARED
    stages = range(choice.get("num_stages", MOST_STAGES), 2, -1)
    sized = (warpgroup_bytes({**choice, "num_stages": n}, itemsize, four, blocks) for n in stages)
    fits = (n for n, size in zip(stages, sized, strict=True) if size <= room)
    return {**choice, "num_stages": next(fits, 2)}


def rated(
    num_tokens: int,
    itemsize: int,
    machine: Machine,
    group: int = 0,
    four: bool = False,
    split: bool = False,
) -> Iterator[tuple[int, Tiles]]:
    """What may be chosen for so many rows, without SPLITS; before it, percent of the tensor cores' speed."""
    few = num_tokens <= DECODE_ROWS
    common = {"TOGETHER": 8, "OVERLAP": 2 if machine.early and few else 1}
    blocks = group > 0 and not four
    kind = "_blocks" if blocks else "_groups" if group else "_four" if four else ""
    kind += "_parts" if blocks and split else ""
    for line in listed(f"warpgroups{kind}", num_tokens):
        rate = line.pop("RATE")
        yield rate, fitted(common | line, itemsize, machine.shared, four, blocks)


def warpgroup_tiles(
    num_tokens: int,
    outputs: int,
    width: int,
    itemsize: int,
    machine: Machine,
    group: int = 0,
    four: bool = False,
    split: bool = False,
) -> Tiles:
    """Tile choices of a product: those expected to end first.

    ``GROUPS`` groups of four warps with 64 outputs each, and ``BLOCK_T`` rows; ``num_stages`` steps of 128
    columns in shared memory; ``PIECE`` rows stored at once; ``PROGRAMS`` per multiprocessor walk the tiles,
    ``TOGETHER`` tiles of rows share a tile of the weight; ``SPLITS``: parts of the sums, 1 without ``split``;
    ``OVERLAP`` (launch_overlap.py) up to ``DECODE_ROWS`` rows.
    """
    return dict(_chosen(num_tokens, outputs, width, itemsize, machine, group, four, split))


@functools.lru_cache(maxsize=4096)
def _chosen(
    num_tokens: int,
    outputs: int,
    width: int,
    itemsize: int,
    machine: Machine,
    group: int,
    four: bool,
    split: bool,
) -> Tiles:
    found: list[tuple[float, Tiles]] = []
    for rate, tiles in rated(num_tokens, itemsize, machine, group, four, split):
        for splits in PARTS if split else (1,):
            choice = tiles | {"SPLITS": splits}
            found.append((cycles(choice, rate, num_tokens, outputs, width, machine, four), choice))
    return min(found, key=lambda pair: pair[0])[1]


def cycles(
    choice: Mapping[str, int],
    rate: int,
    num_tokens: int,
    outputs: int,
    width: int,
    machine: Machine,
    four: bool,
) -> float:
    """How long the busiest multiprocessor takes."""
    groups, block, splits, programs = (choice[n] for n in ("GROUPS", "BLOCK_T", "SPLITS", "PROGRAMS"))
    tiles = -(-num_tokens // block) * -(-outputs // (GROUP_OUTPUTS * groups)) * splits
    rounds = -(-tiles // (machine.multiprocessors * programs))
    steps = -(-width // (STEP * splits))
    product = 2 * groups * block * 100 / rate  # at 4096 products per cycle
    step = max(product, step_bytes(choice, four) / STEP_BYTES) * programs
    parts = 2 * 4 * num_tokens * outputs * splits if splits > 1 else 0  # written, and read again
    return rounds * (steps * step + TILE_CYCLES) + parts / (machine.multiprocessors * PART_BYTES)
