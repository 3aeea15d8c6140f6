"""Tiles of packed_prompt.py's kernel: its constants, which tile a program does next, and the warp that copies
rows of x and words of the weight to shared memory.

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
        STAGES: steps of x in shared memory.
        WORDS: chunks of words there.
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
    WORDS: int
    UNROLL: int
    SPAN: int


class Places(NamedTuple):
    """What is read, strides and sizes; ``zero``: 0, which the compiler does not know."""

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
    """Copy the rows of every step and the words of every chunk, as soon as their place in shared memory is
    free; after the last chunk once more its tile's first words, which are loaded but not used.
    """
    x_desc, w_desc, _y_desc, xs, words, _staged, bars, places = everything
    ready, free, stored, loaded, _filled, _emptied = bars
    PARTS: constexpr = 16 // LOOP.BITS
    BYTES: constexpr = LOOP.BLOCK_T * LOOP.COLS * 2
    slot = 0
    phase = 1
    word_slot = 0
    word_phase = 1
    for tile in range(gl.program_id(0), tile_count(places, LOOP), gl.num_programs(0)):
        first_token, first_output = tile_corner(tile, places, LOOP)
        for chunk in range(places.chunks):
            mbarrier.wait(loaded.index(word_slot), word_phase)
            copy_words(w_desc, first_output, chunk, word_slot, words, stored, places, LOOP)
            word_slot += 1
            if word_slot == LOOP.WORDS:
                word_slot = 0
                word_phase ^= 1
            for part in gl.static_range(PARTS):
                mbarrier.wait(free.index(slot), phase)
                mbarrier.expect(ready.index(slot), BYTES)
                column = (chunk * PARTS + part) * LOOP.COLS
                tma.async_copy_global_to_shared(
                    x_desc, [first_token, column], ready.index(slot), xs.index(slot)
                )
                slot += 1
                if slot == LOOP.STAGES:
                    slot = 0
                    phase ^= 1
    mbarrier.wait(loaded.index(word_slot), word_phase)
    copy_words(w_desc, 0, 0, word_slot, words, stored, places, LOOP)


@gluon.jit
def copy_words(
    w_desc: tensor,
    first_output: tensor,
    chunk: tensor,
    slot: tensor,
    words: tensor,
    stored: tensor,
    places: tensor,
    LOOP: constexpr,
) -> None:
    """Copy the words of one chunk of a tile: each group's, of gates and then of their ups."""
    BLOCKS: constexpr = w_desc.block_shape[0]
    BOXES: constexpr = LOOP.BLOCK_N // (16 * BLOCKS)
    PIECES: constexpr = w_desc.block_shape[1]
    bar = stored.index(slot)
    mbarrier.expect(bar, LOOP.BLOCK_N * LOOP.COLS * 2)
    for box in gl.static_range(BOXES):
        block = first_output // 16 + box * BLOCKS
        if LOOP.GATED:
            block = first_output // 16 + box // 2 * BLOCKS + box % 2 * (places.outputs // 32)
        tma.async_copy_global_to_shared(
            w_desc, [block, chunk * PIECES, 0], bar, words.index(BOXES * slot + box)
        )
