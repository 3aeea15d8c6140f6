"""Tiles of prefill attention, as measured on an H200, and those worth measuring.

default_tiles(max_query_len=512, head_dim=128, itemsize=2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ingot.kernels.kernel_checks import next_power_of_two
from ingot.kernels.launch_overlap import other_overlap
from ingot.kernels.tiles.single_tiles import TARGET_PROGRAMS

# H200, head_dim 128, fp16: 64 queries keep the accumulator of one warp group in registers. Several programs
# share a multiprocessor, so that one exponentiates while another multiplies: 2 with 64 keys per tile; 4 with
# 32 keys and 128 registers per thread, which wins if there are enough programs. fp32 has no tensor-core path:
# small tiles.
_UNLIMITED = {"REGISTERS": 256, "OVERLAP": 1, "num_warps": 4}
TILES_HALF = {"BLOCK_M": 64, "BLOCK_N": 64, **_UNLIMITED, "num_stages": 2}
LONG_TILES = {"BLOCK_N": 32, "REGISTERS": 128, "num_stages": 3}
LONG_CHUNK = 1024
TILES_FLOAT = {"BLOCK_M": 32, "BLOCK_N": 32, **_UNLIMITED, "num_stages": 1}
# On Hopper whole warp groups multiply 128 queries by 128 keys (hopper_attention.py), for requests of so many.
HOPPER_TILES = {"BLOCK_M": 128, "BLOCK_N": 128, **_UNLIMITED, "num_stages": 2}
HOPPER_HEADS = (64, 128)
HOPPER_LEAST = 128
LEAST_PART = 256  # keys per part of a tile: for fewer its sums are not worth writing and reading again


def on_hopper(device: torch.device | None, head_dim: int, itemsize: int) -> bool:
    """Whether a GPU has what hopper_attention.py needs, and queries fit it."""
    if device is None or device.type != "cuda" or not fits_hopper(head_dim, itemsize):
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def fits_hopper(head_dim: int, itemsize: int) -> bool:
    """Whether hopper_attention.py takes queries of such heads and bytes per value."""
    return itemsize == 2 and head_dim in HOPPER_HEADS


def is_hopper_tile(tiles: Mapping[str, int]) -> bool:
    """Whether a choice is the one of hopper_attention.py."""
    return all(tiles.get(name, size) == size for name, size in HOPPER_TILES.items() if "BLOCK" in name)


def default_tiles(
    max_query_len: int,
    head_dim: int,
    itemsize: int,
    narrow: bool = False,
    parts: int = 0,
    hopper: bool = False,
) -> dict[str, int]:
    """Tile choices for an H200: fewer query rows for short chunks, narrower key tiles for wide heads, no
    limit of registers for a cache in 8 bits (``narrow``), more warps to merge ``parts`` of wide heads. With
    ``hopper`` those of hopper_attention.py, but for short chunks and parts.
    """
    if hopper and max_query_len >= HOPPER_LEAST and not parts:
        return dict(HOPPER_TILES)
    if itemsize > 2:
        return dict(TILES_FLOAT) if head_dim <= 64 else {**TILES_FLOAT, "BLOCK_M": 16, "BLOCK_N": 16}
    block_m = min(max(next_power_of_two(max_query_len), 16), TILES_HALF["BLOCK_M"])
    tiles = {**TILES_HALF, "BLOCK_M": block_m}
    if head_dim > 128:
        more = {"num_warps": 8, "num_stages": 1} if narrow else {"num_warps": 8} if parts else {}
        return {**tiles, "BLOCK_N": 32, **more}
    return {**tiles, **LONG_TILES} if max_query_len >= LONG_CHUNK and not narrow else tiles


def most_parts(num_heads: int, num_tokens: int, tile_rows: int) -> int:
    """The most parts of all tiles of ``tile_rows`` queries, in a step of up to so many tokens.

    Times heads they are two programs per multiprocessor of an H200; 0 if whole tiles are as many.
    """
    parts = TARGET_PROGRAMS // num_heads
    return parts if num_tokens < LONG_CHUNK and num_tokens // tile_rows < parts else 0


def parts_of(keys: Sequence[int], most: int) -> list[int]:
    """Parts of each tile, from the number of keys that every tile of the step sees.

    The tile with the longest parts gets one more until there are ``most`` parts. If ``keys`` descend, tiles
    in several parts come first.
    """
    parts = [1] * len(keys)
    for _ in range(len(keys), most if keys else 0):
        longest = max(range(len(keys)), key=lambda tile: keys[tile] / parts[tile])
        if keys[longest] < LEAST_PART * (parts[longest] + 1):
            break
        parts[longest] += 1
    return parts


def candidate_tiles(
    max_query_len: int, head_dim: int, itemsize: int, device: torch.device | None = None
) -> list[dict[str, int]]:
    """Tile choices worth measuring, the default first."""
    hopper = on_hopper(device, head_dim, itemsize)
    default = default_tiles(max_query_len, head_dim, itemsize, hopper=hopper)
    others: list[dict[str, int]] = []
    if is_hopper_tile(default):
        return [default, default_tiles(max_query_len, head_dim, itemsize)]
    if itemsize == 2 and head_dim <= 128 and default["BLOCK_M"] == 64:
        wide = {"BLOCK_M": 128, "BLOCK_N": 64, "REGISTERS": 128, "num_warps": 8, "num_stages": 2}
        others = [dict(TILES_HALF), {**TILES_HALF, "num_stages": 3}, {**TILES_HALF, **LONG_TILES}, wide]
    elif itemsize == 2:
        others = [{"num_stages": 3}]
    candidates = [{**default, **other} for other in [*others, *other_overlap(device)]]
    return [default, *(tiles for tiles in candidates if tiles != default)]
