"""Tiles of packed_prompt.py's kernel: its constants, which tile a program does next, and the warp that copies
rows of x to shared memory.

    first_token, first_output = tile_corner(tile, places, LOOP)
"""

from __future__ import annotations

# mypy: disable-error-code="misc"
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language import constexpr, tensor


class PromptLoop(NamedTuple):
    """The kernel's constants.

    Attributes:
        BITS, GROUP, ZEROS: of the weight.
        BIAS: whether one is added.
        GATED: whether the first half of the outputs are gates, and y is SiLU(gate) · up.
        ADDS: whether y's own values are added.
        COLS: columns of a step: one part of the words.
        BLOCK_T, BLOCK_N: rows and outputs of a tile.
        STAGES: steps in shared memory.
        EARLY: whether words are loaded two chunks ahead instead of one.
        UNROLL: chunks per iteration, which divide those of a row.
        SPAN: tiles of rows that are done for one tile of outputs before the next.
    """

    BITS: int
    GROUP: int
    ZEROS: bool
    BIAS: bool
    GATED: bool
    ADDS: bool
    COLS: int
    BLOCK_T: int
    BLOCK_N: int
    STAGES: int
    EARLY: bool
    UNROLL: int
    SPAN: int


class Places(NamedTuple):
    """What is read, strides and sizes; ``zero``: 0, which the compiler does not know."""

    words: Any
    block_stride: Any
    scales: Any
    zeros: Any
    scale_stride: Any
    bias: Any
    tokens: Any
    outputs: Any
    columns: Any
    chunks: Any
    zero: Any


@gluon.jit
def tile_count(places: tensor, LOOP: constexpr) -> tensor:
    """How many tiles there are."""
    return gl.cdiv(places.tokens, LOOP.BLOCK_T) * (places.outputs // LOOP.BLOCK_N)


@gluon.jit
def tile_corner(tile: tensor, places: tensor, LOOP: constexpr) -> tensor:
    """A tile's first row and column of y; the last tile's past the end."""
    WIDTH: constexpr = LOOP.BLOCK_N // (2 if LOOP.GATED else 1)
    tile = gl.minimum(tile, tile_count(places, LOOP) - 1)
    per = places.outputs // LOOP.BLOCK_N * LOOP.SPAN
    first = tile // per * LOOP.SPAN
    size = gl.minimum(gl.cdiv(places.tokens, LOOP.BLOCK_T) - first, LOOP.SPAN)
    return (first + tile % per % size) * LOOP.BLOCK_T, tile % per // size * WIDTH


@gluon.jit
def copy_rows(everything: tensor, LOOP: constexpr) -> None:
    """Copy the rows of every step, as soon as their place in shared memory is free."""
    x_desc, _y_desc, xs, _staged, ready, free, _filled, _emptied, places = everything
    PARTS: constexpr = 16 // LOOP.BITS
    BYTES: constexpr = LOOP.BLOCK_T * LOOP.COLS * 2
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), tile_count(places, LOOP), gl.num_programs(0)):
        first_token, _first_output = tile_corner(tile, places, LOOP)
        for step in range(places.chunks * PARTS):
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(ready.index(slot), BYTES)
            tma.async_copy_global_to_shared(
                x_desc, [first_token, step * LOOP.COLS], ready.index(slot), xs.index(slot)
            )
            slot += 1
            if slot == LOOP.STAGES:
                slot = 0
                phase ^= 1
