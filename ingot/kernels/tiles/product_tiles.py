"""Default tiles of the small products, by rows, shape and bits of the weight, and what tuning tries.

Owns the tables that measurements on an H200 left. Knows no kernel.

    tiles = matrix_tiles(num_tokens, weight, x.element_size(), x.device)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import triton

from ingot.kernels.checks import next_power_of_two
from ingot.kernels.overlap import overlaps
from ingot.kernels.weight.stored_weight import BLOCK_ROWS, StoredWeight, chunk_columns

# Measured in steps of a 7B model in 16 bits on an H200. By the columns of x's tile: for weights of up to so
# many outputs BLOCK_N, BLOCK_K, warps, stages, PROGRAMS, PREFETCH. Up to 8 rows the launches overlap enough
# that early weights are worth most; from 16 rows on x is worth pipelining, and equal shares.
WIDE = {
    8: [(16383, 32, 256, 2, 4, 0, 1), (65535, 64, 256, 4, 3, 0, 1), (0, 64, 256, 4, 3, 0, 1)],
    16: [(16383, 64, 128, 4, 4, 2, 256), (65535, 64, 128, 4, 3, 3, 128), (0, 128, 128, 4, 3, 2, 0)],
    32: [(16383, 64, 128, 4, 4, 2, 128), (65535, 64, 128, 4, 3, 3, 0), (0, 128, 128, 8, 4, 1, 128)],
    64: [(16383, 128, 64, 8, 5, 1, 0), (65535, 64, 64, 4, 4, 3, 0), (0, 128, 64, 4, 4, 2, 0)],
}
# The same of split sums, by inputs instead of outputs, with SPLITS.
SPLIT = {
    8: [(8192, 64, 256, 4, 3, 0, 1, 4), (0, 128, 128, 4, 3, 0, 2, 8)],
    16: [(8192, 64, 128, 4, 4, 2, 0, 4), (0, 64, 256, 4, 3, 2, 1, 4)],
    32: [(8192, 64, 128, 4, 3, 2, 128, 4), (0, 128, 128, 8, 4, 1, 128, 4)],
    64: [(0, 128, 64, 8, 5, 1, 128, 4)],
}
WHOLE = (0, 16, 64, 2, 3, 0, 1, 1)  # fp32
# Weights of 8 and of 4 bits; BLOCK_K is a chunk of the layout at most.
WIDE_8 = {
    8: [(16383, 64, 128, 4, 8, 3, 0), (0, 64, 128, 2, 6, 4, 0)],
    16: [(0, 64, 128, 4, 6, 3, 0)],
    32: [(16383, 128, 128, 8, 6, 1, 0), (0, 128, 128, 4, 4, 2, 0)],
    64: [(16383, 64, 128, 4, 4, 2, 0), (0, 128, 128, 8, 4, 2, 0)],
}
SPLIT_8 = {
    8: [(8192, 128, 128, 8, 4, 2, 0, 8), (0, 64, 128, 4, 6, 2, 0, 4)],
    16: [(0, 128, 128, 8, 6, 1, 0, 8)],
    32: [(0, 128, 128, 8, 4, 1, 0, 8)],
    64: [(8192, 64, 128, 4, 4, 2, 0, 4), (0, 128, 128, 8, 4, 1, 0, 8)],
}
WIDE_4 = {
    8: [(16383, 64, 256, 4, 6, 2, 0), (0, 64, 256, 4, 6, 3, 0)],
    16: [(16383, 128, 256, 8, 6, 1, 0), (0, 32, 256, 2, 4, 6, 0)],
    32: [(16383, 64, 256, 4, 4, 2, 0), (0, 128, 256, 8, 4, 2, 0)],
    64: [(0, 128, 256, 8, 4, 1, 0)],
}
SPLIT_4 = {
    8: [(8192, 64, 256, 4, 6, 0, 1, 8), (0, 128, 256, 4, 4, 2, 0, 8)],
    16: [(0, 64, 256, 4, 4, 2, 0, 8)],
    32: [(8192, 128, 256, 8, 4, 1, 0, 8), (0, 64, 256, 4, 4, 2, 0, 4)],
    64: [(0, 128, 256, 8, 4, 1, 0, 4)],
}
# The same for up to 8 rows, straight into registers: for weights of up to so many outputs (of split sums:
# inputs) BLOCK_N, warps, FRAGMENTS, SPLITS. Those of 8 bits are the best at 8 rows.
FRAGMENTS_8 = [(16383, 32, 4, 1, 1), (65535, 64, 4, 1, 1), (0, 32, 2, 1, 1)]
FRAGMENTS_4 = [(16383, 32, 4, 1, 1), (0, 32, 2, 1, 1)]
FRAGMENTS_SPLIT_8 = [(0, 32, 2, 2, 8)]
FRAGMENTS_SPLIT_4 = [(8192, 32, 4, 1, 4), (0, 32, 2, 2, 4)]
FRAGMENT_ROWS = 8
DESCRIPTOR_ALIGNMENT = 16  # bytes: of a tensor that a descriptor reads, and of its rows


def takes_fragments(num_tokens: int, weight: StoredWeight, itemsize: int) -> bool:
    """Whether a product of so few rows can load the weight straight into registers."""
    whole = weight.out_features % BLOCK_ROWS == 0 and weight.in_features % 8 == 0
    narrow = weight.bits == 4 or (weight.bits == 8 and not weight.group)
    return narrow and whole and itemsize == 2 and num_tokens <= FRAGMENT_ROWS


def settled(choice: Mapping[str, int], pairs: bool = False) -> dict[str, int]:
    """The choice, without FRAGMENTS where other tiles leave no room for them: BLOCK_N in blocks of 16, of
    both of a pair where there are ``pairs``; at most 16 rows; no shares.
    """
    block = BLOCK_ROWS * (2 if pairs else 1)
    fits = choice["BLOCK_N"] % block == 0 and choice["BLOCK_T"] in (8, 16) and not choice["PROGRAMS"]
    return {**choice, "FRAGMENTS": choice["FRAGMENTS"] if fits else 0}


def _fragment_tiles(weight: StoredWeight, device: torch.device, split: bool = False) -> dict[str, int]:
    wide, parts = (FRAGMENTS_8, FRAGMENTS_SPLIT_8) if weight.bits == 8 else (FRAGMENTS_4, FRAGMENTS_SPLIT_4)
    choice = _up_to(weight.in_features, parts) if split else _up_to(weight.out_features, wide)
    _, rows, warps, depth, splits = choice
    tiles = {"BLOCK_T": 8, "BLOCK_N": rows, "BLOCK_K": chunk_columns(weight.bits, weight.group)}
    tiles |= {"num_warps": warps, "SPLITS": splits, "FRAGMENTS": depth, "num_stages": 1, "PROGRAMS": 0}
    return tiles | {"PREFETCH": 0, "OVERLAP": 4 if overlaps(device) else 1}


def matrix_tiles(
    num_tokens: int, weight: StoredWeight, itemsize: int, device: torch.device, blocks: bool = True
) -> dict[str, int]:
    """Tile choices of a matrix product; ``itemsize``: bytes of an activation; ``blocks``: whether the op
    takes its rows in blocks of 16.
    """
    if blocks and takes_fragments(num_tokens, weight, itemsize):
        return _fragment_tiles(weight, device)
    columns = max(next_power_of_two(num_tokens), 8)
    table = {16: WIDE, 8: WIDE_8, 4: WIDE_4}[weight.bits]
    choice = WHOLE[:-1] if itemsize == 4 else _up_to(weight.out_features, table[columns])
    return _tiles(choice, columns, weight, itemsize, device)


def split_tiles(num_tokens: int, weight: StoredWeight, itemsize: int, device: torch.device) -> dict[str, int]:
    """Tile choices of a product of partial sums, with ``SPLITS``: a narrow weight has few tiles."""
    if takes_fragments(num_tokens, weight, itemsize):
        return _fragment_tiles(weight, device, split=True)
    columns, width = max(next_power_of_two(num_tokens), 8), weight.in_features
    table = {16: SPLIT, 8: SPLIT_8, 4: SPLIT_4}[weight.bits]
    choice = WHOLE if itemsize == 4 else _up_to(width, table[columns])
    wider = weight.bits == 16 and itemsize == 2 and width > 8192
    return _tiles(choice, max(columns, 16) if wider else columns, weight, itemsize, device)


def _up_to(size: int, choices: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The first choice for so large a size; 0 is for all others."""
    return next(choice for choice in choices if size <= choice[0] or choice[0] == 0)


def _tiles(
    choice: tuple[int, ...], columns: int, weight: StoredWeight, itemsize: int, device: torch.device
) -> dict[str, int]:
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH", "SPLITS")
    tiles = {"BLOCK_T": columns, "FRAGMENTS": 0, "OVERLAP": 2 if overlaps(device) else 1}
    tiles |= dict(zip(names, choice[1:], strict=False))
    if weight.bits < 16:
        tiles["BLOCK_K"] = chunk_columns(weight.bits, weight.group)
    size = itemsize if weight.bits == 16 else weight.bits / 8
    stage = int((tiles["BLOCK_N"] * size + columns * itemsize) * tiles["BLOCK_K"])
    room = shared_bytes(device) // stage - (
        weight.bits < 16
    )  # newer Tritons hold a stage more of narrow weights
    return tiles | {"num_stages": max(min(tiles["num_stages"], room), 2)}


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may use; an H200's where there is no GPU."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def has_descriptors(device: torch.device) -> bool:
    """Whether kernels can read through tensor descriptors (TMA)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def whole_chunks(choice: Mapping[str, int], weight: StoredWeight) -> dict[str, int]:
    """The choice with the BLOCK_K that a weight's layout needs."""
    return (
        {**choice, "BLOCK_K": chunk_columns(weight.bits, weight.group)} if weight.bits < 16 else dict(choice)
    )


def matrix_candidates(default: Mapping[str, int]) -> list[dict[str, int]]:
    """What tuning tries for a matrix product or its parts: the default first."""
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH")
    if default["BLOCK_T"] <= 8:
        shapes = [(64, 256, 4, 3, 0, 1), (32, 256, 2, 4, 0, 1), (64, 128, 4, 4, 2, 0), (64, 128, 4, 4, 3, 1)]
    elif default["BLOCK_T"] == 16:
        shapes = [(128, 128, 4, 3, 2, 0), (64, 128, 4, 4, 2, 0), (64, 256, 4, 3, 2, 1), (64, 128, 4, 4, 3, 0)]
    else:
        shapes = [(64, 64, 4, 4, 3, 0), (128, 64, 8, 4, 2, 0), (64, 128, 4, 3, 2, 0), (128, 64, 8, 5, 1, 0)]
    found = [dict(default), *({**default, **dict(zip(names, shape, strict=True))} for shape in shapes)]
    return [tiles for place, tiles in enumerate(found) if tiles not in found[:place]]
