"""Constants and arguments of the product by groups of warps on Hopper (warpgroup_kernel.py), and the order of
its tiles and steps.
"""

from __future__ import annotations

# mypy: disable-error-code="misc"
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import constexpr, tensor

OUTPUTS = constexpr(64)  # of a group of four warps
COLUMNS = constexpr(128)  # of a step


class WarpLoop(NamedTuple):
    """The kernel's constants.

    Attributes:
        FOUR: columns per group of a weight of 4 bits inside 8; 0: the weight is int8.
        GROUP: columns of a row that share a scale, those of a step; 0: the whole row.
        GROUPS: groups of four warps that multiply, up to 3.
        BLOCK_T: rows of a tile.
        STAGES: steps in shared memory.
        PIECE: rows of a tile that are stored at once; 0: they go straight from registers.
        TOGETHER: tiles of rows that are done for one tile of outputs before the next.
        OVERLAP: launch_overlap.py.
        EARLY: whether the weight is asked for before the previous kernel has ended.
        KEPT: steps of a part, in whole 32, if rows' scales are kept in shared memory.
    """

    FOUR: int
    GROUP: int
    GROUPS: int
    BLOCK_T: int
    STAGES: int
    PIECE: int
    TOGETHER: int
    OVERLAP: int
    EARLY: bool = False
    KEPT: int = 0


class WarpRows(NamedTuple):
    """The rows' scales and their row stride."""

    scales: Any
    scale_stride: Any


class WarpWeight(NamedTuple):
    """The weight's scales; of 4 bits inside 8 also steps, zeros and the elements between their groups."""

    scales: Any
    steps: Any = None
    zeros: Any = None
    level_stride: Any = None


class Program(NamedTuple):
    """What all warps of a program share: arguments, sizes, and in shared memory the steps' operands with
    barriers when they are there and when they are no longer needed, pieces to store with theirs, and scales
    of rows.
    """

    x_source: Any
    weight_source: Any
    y_pieces: Any
    residual_pieces: Any
    x: Any
    weight: Any
    out: Any
    rows: Any
    outputs: Any
    columns: Any
    x_steps: Any
    weight_steps: Any
    ready: Any
    free: Any
    pieces: Any
    added: Any
    scales: Any


@gluon.jit
def num_tiles(p: Program, LOOP: constexpr) -> tensor:
    return gl.cdiv(p.rows, LOOP.BLOCK_T) * gl.cdiv(p.outputs, OUTPUTS * LOOP.GROUPS)


@gluon.jit
def corner(tile: tensor, p: Program, LOOP: constexpr) -> tensor:
    """A tile's first output and row."""
    TOGETHER: constexpr = LOOP.TOGETHER
    tiles_n = gl.cdiv(p.outputs, OUTPUTS * LOOP.GROUPS)
    band = tile // (TOGETHER * tiles_n)
    height = gl.minimum(gl.cdiv(p.rows, LOOP.BLOCK_T) - band * TOGETHER, TOGETHER)
    place = tile - band * TOGETHER * tiles_n
    return place // height * (OUTPUTS * LOOP.GROUPS), (band * TOGETHER + place % height) * LOOP.BLOCK_T


@gluon.jit
def steps_of(p: Program) -> tensor:
    """A part's first step, and how many it has."""
    steps = gl.cdiv(gl.cdiv(p.columns, COLUMNS), gl.num_programs(1))
    return gl.program_id(1) * steps, steps


@gluon.jit
def next_slot(slot: tensor, phase: tensor, LOOP: constexpr) -> tensor:
    slot += 1
    if slot == LOOP.STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def slot_before(slot: tensor, LOOP: constexpr) -> tensor:
    """The slot before. (Triton does not carry a loop's variable that starts as another one's copy.)"""
    before = slot - 1
    if before < 0:
        before = LOOP.STAGES - 1
    return before
