"""Tiles of products of few rows by rows, shape and bits of the weight: the rules beside tile_tables.py.

tiles = small_tiles(num_tokens, weight, x.element_size(), x.device)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import triton

from ingot.kernels.kernel_checks import next_power_of_two
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.tiles.tile_tables import Tiles, chosen, each_once, is_narrow, listed
from ingot.kernels.weight.stored_weight import BLOCK_ROWS, StoredWeight, chunk_columns

MAX_ROWS = 64  # of the kernels of few rows
FRAGMENT_ROWS = 8  # up to so many, weights of few bits go straight into registers
MULTIPROCESSORS = 132  # of an H200 and an H100
DESCRIPTOR_ALIGNMENT = 16  # bytes, of a tensor that a descriptor reads and of its rows


class WeightShape(NamedTuple):
    """What tiles depend on in a weight."""

    out_features: int
    in_features: int
    bits: int = 16
    group: int = 0

    @staticmethod
    def of(weight: StoredWeight | WeightShape) -> WeightShape:
        """The shape of a weight."""
        return WeightShape(weight.out_features, weight.in_features, weight.bits, weight.group)


Shaped = StoredWeight | WeightShape


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may use; an H200's without a GPU."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def has_descriptors(device: torch.device) -> bool:
    """Whether kernels can read through tensor descriptors (TMA)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_warpgroups(device: torch.device) -> bool:
    """Whether the tensor cores multiply for groups of four warps (`wgmma`): on Hopper alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def takes_fragments(num_tokens: int, weight: Shaped, itemsize: int) -> bool:
    """Whether a product of so many rows can load the weight straight into registers."""
    whole = weight.out_features % BLOCK_ROWS == 0 and weight.in_features % 8 == 0
    narrow = weight.bits == 4 or (weight.bits == 8 and not weight.group)
    return narrow and whole and itemsize == 2 and num_tokens <= FRAGMENT_ROWS


def settled(choice: Mapping[str, int], pairs: bool = False) -> Tiles:
    """The choice, without FRAGMENTS unless BLOCK_N is whole blocks of 16 (of both of a pair if there are
    ``pairs``), BLOCK_T at most 16, and there are no shares.
    """
    block = BLOCK_ROWS * (2 if pairs else 1)
    fits = choice["BLOCK_N"] % block == 0 and choice["BLOCK_T"] in (8, 16) and not choice["PROGRAMS"]
    return {**choice, "FRAGMENTS": choice["FRAGMENTS"] if fits else 0}


def fewer_registers(choice: Mapping[str, int]) -> Tiles:
    """The choice for 4 bits in fp16, whose sums are two, or in groups of 64, with four scales per chunk:
    a warp has no registers for 64 outputs of the chunk that it multiplies and of one ahead.
    """
    spills = choice["FRAGMENTS"] > 1 and choice["BLOCK_N"] > 32
    return {**choice, **({"BLOCK_N": 32, "num_warps": 4} if spills else {})}


def whole_chunks(choice: Mapping[str, int], weight: Shaped) -> Tiles:
    """The choice with the BLOCK_K of a weight's layout."""
    chunk = {"BLOCK_K": chunk_columns(weight.bits, weight.group)} if weight.bits < 16 else {}
    return {**choice, **chunk}


def small_tiles(
    num_tokens: int,
    weight: Shaped,
    itemsize: int,
    device: torch.device,
    blocks: bool = True,
    narrow: bool = True,
) -> Tiles:
    """Tile choices of a whole product of up to 64 rows; ``itemsize``: bytes of an activation; ``blocks``:
    whether the op takes its rows in blocks of 16; ``narrow``: whether tables of narrow models fit the op.
    """
    if num_tokens <= 1 and weight.bits == 16:
        return _one_row(weight, device)
    if blocks and takes_fragments(num_tokens, weight, itemsize):
        return _straight(weight, device, "straight", weight.out_features, narrow)
    columns = max(next_power_of_two(num_tokens), 8)
    table = "float" if itemsize == 4 else _table(weight)
    wanted = functools.partial(_fits, columns, itemsize, device) if table == "dense" else None
    tiles = _chosen(table, num_tokens, weight.out_features, weight, narrow, wanted)
    return _staged(tiles, columns, weight, itemsize, device)


def split_tiles(num_tokens: int, weight: Shaped, itemsize: int, device: torch.device) -> Tiles:
    """Tile choices of partial sums, with ``SPLITS``: few outputs have few tiles."""
    width = weight.in_features
    if takes_fragments(num_tokens, weight, itemsize):
        return _straight(weight, device, "straight_parts", width)
    columns = max(next_power_of_two(num_tokens), 8)
    if weight.bits == 16 and itemsize == 2 and width > 8192:
        columns = max(columns, 16)
    table = "float" if itemsize == 4 else _table(weight)
    return _staged(_chosen(f"{table}_parts", num_tokens, width, weight), columns, weight, itemsize, device)


def _chosen(
    table: str,
    rows: int,
    size: int,
    weight: Shaped,
    narrow: bool = True,
    wanted: Callable[[Tiles], bool] | None = None,
) -> Tiles:
    narrow = narrow and is_narrow(weight.out_features, weight.in_features)
    return chosen(table, rows, size, wanted, narrow=narrow)


def _fits(columns: int, itemsize: int, device: torch.device, tiles: Tiles) -> bool:
    """Whether two stages of a dense product's tiles fit into shared memory."""
    stage = (tiles["BLOCK_N"] + columns) * tiles["BLOCK_K"] * itemsize
    return 2 * stage <= shared_bytes(device)


def _table(weight: Shaped) -> str:
    return "dense" if weight.bits == 16 else f"{weight.bits}_bits"


def _one_row(weight: Shaped, device: torch.device) -> Tiles:
    """Of a dense weight, by vector sums; of few outputs two tiles per multiprocessor."""
    out_features, whole = weight.out_features, max(next_power_of_two(weight.in_features), 16)
    most = max(next_power_of_two(out_features // (2 * MULTIPROCESSORS) + 1) // 2, 2)
    if whole > 4096:
        tiles = {"BLOCK_N": min(8, most), "BLOCK_K": 2048, "num_warps": 8, "PROGRAMS": 2}
    elif out_features >= 65536:
        tiles = {"BLOCK_N": 4, "BLOCK_K": whole, "num_warps": 8, "PROGRAMS": 512}
    elif 1024 <= whole <= 2048 and 3072 <= out_features < 8192:
        tiles = {"BLOCK_N": 4, "BLOCK_K": whole, "num_warps": 2, "PROGRAMS": 8}
    else:
        rows = min(max(8192 // whole, 2), 16, most)
        warps, programs = (8, 4) if out_features < 8192 else (4, 4)
        programs = 8 if out_features >= 28672 or 6144 <= out_features < 8192 else programs
        tiles = {"BLOCK_N": rows, "BLOCK_K": whole, "num_warps": warps, "PROGRAMS": programs}
    common = {"BLOCK_T": 1, "FRAGMENTS": 0, "PREFETCH": 1, "num_stages": 1}
    return tiles | common | {"OVERLAP": 2 if overlaps(device) else 1}


def _straight(weight: Shaped, device: torch.device, kind: str, size: int, narrow: bool = True) -> Tiles:
    tiles = _chosen(f"{weight.bits}_bits_{kind}", 0, size, weight, narrow)
    tiles |= {"BLOCK_T": 8, "BLOCK_K": chunk_columns(weight.bits, weight.group), "num_stages": 1}
    return tiles | {"PROGRAMS": 0, "PREFETCH": 0, "OVERLAP": 4 if overlaps(device) else 1}


def _staged(tiles: Tiles, columns: int, weight: Shaped, itemsize: int, device: torch.device) -> Tiles:
    """With no more stages than shared memory holds."""
    tiles = whole_chunks(tiles, weight)
    tiles |= {"BLOCK_T": columns, "FRAGMENTS": 0, "OVERLAP": 2 if overlaps(device) else 1}
    size = itemsize if weight.bits == 16 else weight.bits / 8
    stage = int((tiles["BLOCK_N"] * size + columns * itemsize) * tiles["BLOCK_K"])
    newer = weight.bits < 16  # newer Tritons hold a stage more of narrow weights
    room = shared_bytes(device) // stage - newer
    return tiles | {"num_stages": max(min(tiles["num_stages"], room), 2)}


def candidate_tiles(num_rows: int, weight: Shaped, itemsize: int, device: torch.device) -> list[Tiles]:
    """What tuning of ``small_linear``, ``small_gate_up`` and ``small_qkv`` tries: the default first."""
    default = small_tiles(num_rows, weight, itemsize, device)
    if default["BLOCK_T"] > 1:
        return each_once([default, *(default | tiles for tiles in listed("try_dense", default["BLOCK_T"]))])
    changes = [{"PROGRAMS": 2 * default["PROGRAMS"]}, {"num_warps": 4 if default["num_warps"] == 8 else 8}]
    changes.append({"BLOCK_N": 2 * default["BLOCK_N"]})
    if overlaps(device):
        changes.append({"OVERLAP": 4})
    return [default, *(default | change for change in changes)]
