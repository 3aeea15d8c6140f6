"""How a product of few rows is launched: loop, grid and options, resolved once per shape and cached.

launch = float_launch(LINEAR, x, weight, tiles)
few_linear_kernel[launch.grid](..., launch.loop, **launch.options)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton

from ingot.kernels.kernel_checks import KernelArgumentError, merge_tiles, multiprocessors, next_power_of_two
from ingot.kernels.launch_overlap import launch_options
from ingot.kernels.product.product_arguments import ProductLoop
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows
from ingot.kernels.tiles.int8_tiles import INT8_FRAGMENT_ROWS, small_int8_tiles, whole_steps
from ingot.kernels.tiles.product_tiles import (
    WeightShape,
    fewer_registers,
    settled,
    small_tiles,
    split_tiles,
    whole_chunks,
)
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, outputs_of
from ingot.kernels.weight.stored_weight import BLOCK_ROWS, StoredWeight

KEPT_LAUNCHES = 4096  # a few for every product and number of rows


class ResolvedLaunch(NamedTuple):
    """A launch; ``share``: outputs, or pairs, per program; ``splits``: parts of the sums."""

    loop: ProductLoop
    share: int
    splits: int
    grid: tuple[int, ...]
    options: dict[str, Any]


Given = tuple[tuple[str, int], ...]


class _Op(NamedTuple):
    """``linear``, ``parts``, ``gate_up``, or ``qkv`` with a head's channels and rotated channels."""

    name: str
    head_dim: int = 0
    rotary: int = 0


LINEAR, PARTS, GATE_UP = _Op("linear"), _Op("parts"), _Op("gate_up")


def float_launch(
    op: tuple[str, int, int], x: torch.Tensor, weight: StoredWeight, tiles: Mapping[str, int] | None = None
) -> ResolvedLaunch:
    """The launch of a product of float rows x [M, K], with ``tiles`` over the defaults."""
    shape = (weight.out_features, weight.in_features, weight.bits, weight.group)
    given = tuple(tiles.items()) if tiles else ()
    return _float_launch(op, x.shape[0], shape, x.dtype, x.device, given)


@functools.lru_cache(maxsize=KEPT_LAUNCHES)
def _float_launch(
    named: tuple[str, int, int],
    rows: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    given: Given,
) -> ResolvedLaunch:
    op, shape, itemsize = _Op(*named), WeightShape(*sizes), dtype.itemsize
    if op.name == "parts":
        defaults = split_tiles(rows, shape, itemsize, device)
    else:
        blocks = op.name != "gate_up" or shape.out_features // 2 % BLOCK_ROWS == 0
        if op.name == "qkv":
            blocks = op.head_dim % (2 * BLOCK_ROWS) == 0 and op.rotary == op.head_dim
        # Straight into registers both channels of a pair have blocks of 16, more than narrow tables give.
        narrow = op.name == "linear" or (op.name == "qkv" and shape.bits == 16)
        defaults = small_tiles(rows, shape, itemsize, device, blocks, narrow)
    if shape.bits == 4 and (dtype == torch.float16 or shape.group == 64):
        defaults = fewer_registers(defaults)
    choice = whole_chunks(merge_tiles(defaults, dict(given)), shape)
    choice = settled(choice, pairs=op.name in ("gate_up", "qkv"))
    kind = "matrix" if shape.bits == 16 else "packed"
    if choice["BLOCK_T"] == 1 and op.name != "parts":
        kind = "vectors"
    elif choice["FRAGMENTS"]:
        kind = "fragments"
    asm = shape.bits != 16 and device.type != "cpu"
    constants = {"KIND": kind, "BITS": shape.bits, "GROUP": shape.group, "WEIGHT_GROUP": 0, "ASM": asm}
    return _resolved(op, rows, shape, choice, constants, device)


def int8_launch(
    op: tuple[str, int, int], x: Int8Rows, weight: AnyInt8, tiles: Mapping[str, int] | None = None
) -> ResolvedLaunch:
    """The launch of a product of rows in 8 bits, with ``tiles`` over the defaults.

    A weight of 4 bits is multiplied as it is (``int8_fragments``) if the tile FRAGMENTS says so, there are at
    most 16 rows, rows start at multiples of 16 bytes, chunks are whole 128 columns, and there are no shares.
    Otherwise another kernel writes it as int8 first, and the launch waits for that.
    """
    given = tuple(tiles.items()) if tiles else ()
    shape = (outputs_of(weight), x.values.shape[1], 8, x.group)
    fits, four_bits = False, 0
    if isinstance(weight, Int4Weight):
        sides, four_bits = (x.values, weight.pairs), weight.group
        fits = all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in sides)
    temporary = not isinstance(weight, Int4Weight) and weight.temporary
    stored = (four_bits, fits, temporary, x.values.dtype == E4M3)
    return _int8_launch(op, x.values.shape[0], shape, x.values.device, given, stored)


@functools.lru_cache(maxsize=KEPT_LAUNCHES)
def _int8_launch(
    named: tuple[str, int, int],
    rows: int,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    given: Given,
    stored: tuple[int, bool, bool, bool],
) -> ResolvedLaunch:
    op, shape = _Op(*named), WeightShape(*sizes)
    (four_bits, fits, temporary, e4m3), group, split = stored, shape.group, op.name == "parts"
    defaults = small_int8_tiles(rows, *shape[:2], device, group, split, four_bits > 0, e4m3)
    choice = whole_steps(merge_tiles(defaults, dict(given)), group)
    if op.name == "qkv":  # a tile's rows are two runs, half a head apart
        fits &= op.rotary in (0, op.head_dim) and op.head_dim // 2 % (choice["BLOCK_N"] // 2) == 0
    elif not split:
        fits &= not group  # a whole sum adds its groups in one order for any number of rows
    fits &= shape.in_features % 16 == 0 and choice["BLOCK_K"] % 128 == 0 and group in (0, choice["BLOCK_K"])
    if not (fits and choice["FRAGMENTS"] and rows <= INT8_FRAGMENT_ROWS and not choice["PROGRAMS"]):
        # A product loads its weight before the previous kernel has ended, which here writes the weight.
        choice |= {"FRAGMENTS": 0} | ({"OVERLAP": 1} if four_bits or temporary else {})
    straight = choice["FRAGMENTS"] > 0
    constants = {"KIND": "int8_fragments" if straight else "matrix", "BITS": 8, "GROUP": group}
    constants |= {"WEIGHT_GROUP": four_bits if straight else 0, "ASM": straight and device.type != "cpu"}
    return _resolved(op, rows, shape, choice, constants, device)


def _resolved(
    op: _Op,
    rows: int,
    shape: WeightShape,
    choice: dict[str, int],
    constants: dict[str, Any],
    device: torch.device,
) -> ResolvedLaunch:
    kind, width = constants["KIND"], shape.in_features
    if choice["BLOCK_T"] < rows:
        what = "BLOCK_T is smaller than the number of rows"
        raise KernelArgumentError(what, seen=choice["BLOCK_T"], allowed=f"{rows} or more")
    span = shape.group if kind == "matrix" and constants["BITS"] == 8 and shape.group else choice["BLOCK_K"]
    steps = triton.cdiv(width, span)
    # A part without columns would have nothing to wait for.
    splits = min(choice["SPLITS"], steps) if op.name == "parts" else 1
    grid, share = _shared(op, kind, shape, choice | {"SPLITS": splits}, device)
    straight, vectors = choice["FRAGMENTS"] > 0, kind == "vectors"
    names = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "FRAGMENTS", "OVERLAP")
    tiles: dict[str, Any] = {name: choice[name] for name in names} | {"BLOCK_X": 0, "WARPS": 0}
    tiles["PREFETCH"] = 0 if straight or vectors else choice["PREFETCH"]
    options: dict[str, Any] = dict(launch_options(choice, device))
    if straight:
        tiles["WARPS"] = choice["num_warps"]
        options["num_stages"] = 1
    elif vectors:
        whole = next_power_of_two(width)
        tiles["BLOCK_X"] = max(min(whole, 4096), whole // 16)
    else:
        options["num_stages"] = choice["num_stages"]
    if kind == "int8_fragments":
        tiles["BLOCK_T"] = INT8_FRAGMENT_ROWS
    return ResolvedLaunch(
        ProductLoop(K=width, STEPS=steps, **constants, **tiles), share, splits, grid, options
    )


def _shared(
    op: _Op, kind: str, shape: WeightShape, choice: Mapping[str, int], device: torch.device
) -> tuple[tuple[int, ...], int]:
    """The grid, and outputs, or pairs, per program."""
    pairs = op.name in ("gate_up", "qkv")
    block, units = choice["BLOCK_N"] // (1 + pairs), shape.out_features // (1 + pairs)
    if kind == "vectors":  # at most PROGRAMS per multiprocessor walk the tiles
        return (min(triton.cdiv(units, block), multiprocessors(device) * choice["PROGRAMS"]),), block
    if op.name == "qkv":
        heads, in_head = shape.out_features // op.head_dim, op.head_dim // 2
        share, programs = block, choice["PROGRAMS"] * multiprocessors(device)
        if programs:  # heads in as many equal parts as there are programs
            parts = max(programs // heads, triton.cdiv(in_head, block))
            share = triton.cdiv(in_head, min(parts, in_head))
        return (heads * triton.cdiv(in_head, share),), share
    share = even_share(units, block, choice, device)
    return (triton.cdiv(units, share), choice["SPLITS"]), share


def even_share(outputs: int, block: int, choice: Mapping[str, int], device: torch.device) -> int:
    """Outputs per program, at most ``block``, such that waves of PROGRAMS per multiprocessor share them
    evenly; with PROGRAMS 0 a whole block.
    """
    if choice["PROGRAMS"] == 0:
        return block
    at_once = max(choice["PROGRAMS"] * multiprocessors(device) // choice.get("SPLITS", 1), 1)
    waves = triton.cdiv(outputs, block * at_once)
    return min(triton.cdiv(outputs, waves * at_once), block)
