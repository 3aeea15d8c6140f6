"""Tokens that a row may not choose, from its packed mask: one bit per token, 32 in a word.

The launch depends on batch and vocabulary alone, so a CUDA graph can hold it.

    mask_tokens(rows, masks, places)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import expect, expect_contiguous, merge_tiles, runs_on_gpu

# Not measured.
TILES = {"TILE": 1024, "PROGRAMS": 4096, "num_warps": 4}


@triton.jit(do_not_specialize_on_alignment=("place_ptr",))  # a row of a stack: it varies with B
def mask_kernel(
    rows_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    place_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """TILE tokens of a row at a time; the row itself is not read."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.load(place_ptr + row)
    if place >= 0:
        for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
            ids = tile * TILE + tl.arange(0, TILE)
            inside = ids < VOCAB
            words = tl.load(masks_ptr + place * WORDS + ids // 32, mask=inside, other=0)
            banned = ((words >> (ids % 32)) & 1) == 0
            nothing = tl.full([TILE], float("-inf"), dtype=tl.float32)
            tl.store(rows_ptr + row * VOCAB + ids, nothing, mask=inside & banned)


def mask_tokens_reference(rows: torch.Tensor, masks: torch.Tensor, places: torch.Tensor) -> None:
    """The PyTorch reference of :func:`mask_tokens`."""
    shifts = torch.arange(32, dtype=torch.int32, device=rows.device)
    for row, place in enumerate(places.tolist()):
        if place >= 0:
            banned = ((masks[place][:, None] >> shifts) & 1).flatten()[: rows.shape[1]] == 0
            rows[row].masked_fill_(banned, -torch.inf)


def mask_tokens(
    rows: torch.Tensor, masks: torch.Tensor, places: torch.Tensor, tiles: Mapping[str, int] | None = None
) -> None:
    """Set the scores that a row's mask does not allow to -inf.

    Args:
        rows: [B, V] float32, contiguous, written.
        masks: [M, ceil(V / 32)] int32, contiguous; bit ``t % 32`` of word ``t // 32`` is set if token t is
            allowed.
        places: [B] int64, row of ``masks``; -1: the row is left as it is.
        tiles: choices over ``TILES``.
    """
    expect("rows", rows, (None, None), like=rows, dtype=torch.float32)
    expect("masks", masks, (None, triton.cdiv(rows.shape[1], 32)), like=rows, dtype=torch.int32)
    expect("places", places, (rows.shape[0],), like=rows, dtype=torch.int64)
    expect_contiguous("rows", rows)
    expect_contiguous("masks", masks)
    if not runs_on_gpu(rows):
        mask_tokens_reference(rows, masks, places)
        return
    choice, (count, vocab) = merge_tiles(TILES, tiles), rows.shape
    if count:
        number = triton.cdiv(vocab, choice["TILE"])
        mask_kernel[(min(number, max(choice["PROGRAMS"] // count, 1)), count)](
            rows, masks, places, VOCAB=vocab, WORDS=masks.shape[1], TILES=number, TILE=choice["TILE"],
            num_warps=choice["num_warps"],
        )  # fmt: skip
