"""Whisper's timestamp rules and token lists, applied to rows of logits.

Tokens that a transcript never has, or not at its first place, are ruled out; timestamps come in pairs and
never fall; and only timestamps stay if all of them together are likelier than any other token. The host knows
the tokens before the newest; the newest is read on the device, so that nothing waits for it. The launch
depends on batch and vocabulary alone, so a CUDA graph can hold it.

    rows = hold_transcripts(logits, tables, TranscriptRows(sets, last_times, paired, ids, places))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import expect, expect_contiguous, expect_rows, merge_tiles, runs_on_gpu

PLACES = ("sets_ptr", "last_ptr", "paired_ptr", "place_ptr")  # rows of a stack: they vary with B
# Not measured: one program per row, 4 logits per thread and iteration.
TILES = {"TILE": 2048, "num_warps": 16}


class TranscriptTables(NamedTuple):
    """Sets of rules, S of them.

    Attributes:
        masks: [2 S, ceil(V / 32)] int32, contiguous: bit ``t % 32`` of word ``t // 32`` is set if token t is
            allowed; row 2 s is for the first place, row 2 s + 1 for all others.
        bounds: [S, 2] int64, contiguous: id of the first timestamp (V without timestamps), id of the end
            token.
    """

    masks: torch.Tensor
    bounds: torch.Tensor


class TranscriptRows(NamedTuple):
    """The state of each row's transcript, int64.

    Attributes:
        sets: [B], row of ``TranscriptTables.masks``: 2 s at the first place, then 2 s + 1; -1: the row is
            only widened, and its other values are not used.
        last_times: [B], the newest timestamp before the newest token; -1: none.
        paired: [B], 1 if the token before the newest is a timestamp, or there is none.
        ids: [T], the step's input tokens.
        places: [B], index there of the row's newest token.
    """

    sets: torch.Tensor
    last_times: torch.Tensor
    paired: torch.Tensor
    ids: torch.Tensor
    places: torch.Tensor


@triton.jit
def _allowed(
    words_ptr: tl.tensor, ids: tl.tensor, low: tl.tensor, high: tl.tensor, VOCAB: tl.constexpr
) -> tl.tensor:
    """Whether tokens are in the mask and outside [low, high)."""
    words = tl.load(words_ptr + ids // 32, mask=ids < VOCAB, other=0)
    return (((words >> (ids % 32)) & 1) != 0) & ((ids < low) | (ids >= high))


@triton.jit(do_not_specialize_on_alignment=PLACES)
def transcript_kernel(
    logits_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    sets_ptr: tl.tensor,
    last_ptr: tl.tensor,
    paired_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    place_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per row: widen it and apply its rules. If timestamps win against the largest of the other
    tokens, these are written once more.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    own_ptr = out_ptr + row * VOCAB
    place = tl.load(sets_ptr + row)
    nothing = tl.full([TILE], float("-inf"), dtype=tl.float32)
    if place < 0:
        for start in range(0, VOCAB, TILE):
            ids = start + tl.arange(0, TILE)
            scores = tl.load(row_ptr + ids, mask=ids < VOCAB, other=0.0).to(tl.float32)
            tl.store(own_ptr + ids, scores, mask=ids < VOCAB)
    else:
        words_ptr = masks_ptr + place * WORDS
        first = tl.load(bounds_ptr + place // 2 * 2).to(tl.int32)
        end = tl.load(bounds_ptr + place // 2 * 2 + 1).to(tl.int32)
        newest = tl.load(ids_ptr + tl.load(place_ptr + row)).to(tl.int32)
        behind = place % 2 == 1
        after = behind & (newest >= first)
        pair = after & (tl.load(paired_ptr + row) != 0)
        last = tl.where(after, newest, tl.load(last_ptr + row).to(tl.int32))
        low = tl.where(after & (pair == 0), 0, first)  # start of the range that pairing rules out
        high = tl.where(after, end, first)
        high = tl.where(pair, VOCAB, high)
        # Timestamps before the last one are ruled out, and the last one unless it opens an unclosed pair.
        passed = tl.where(behind & (last >= first), last + tl.where(after & (pair == 0), 0, 1), first)
        most = nothing
        for start in range(0, first, TILE):
            ids = start + tl.arange(0, TILE)
            inside = ids < first
            scores = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
            scores = tl.where(_allowed(words_ptr, ids, low, high, VOCAB) & inside, scores, nothing)
            tl.store(own_ptr + ids, scores, mask=inside)
            # NaN counts as the largest, so it stays.
            most = tl.maximum(most, tl.where(scores != scores, float("inf"), scores))
        text = tl.max(most, axis=0)
        peak = nothing
        for start in range(first, VOCAB, TILE):
            ids = start + tl.arange(0, TILE)
            inside = ids < VOCAB
            scores = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
            allowed = _allowed(words_ptr, ids, low, high, VOCAB) & (ids >= passed) & inside
            scores = tl.where(allowed, scores, nothing)
            tl.store(own_ptr + ids, scores, mask=inside)
            peak = tl.maximum(peak, tl.where(scores != scores, float("inf"), scores))
        top = tl.max(peak, axis=0)
        if (top > float("-inf")) & (top < float("inf")):
            total = tl.zeros([TILE], dtype=tl.float32)
            for start in range(first, VOCAB, TILE):
                ids = start + tl.arange(0, TILE)
                inside = ids < VOCAB
                scores = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
                allowed = _allowed(words_ptr, ids, low, high, VOCAB) & (ids >= passed) & inside
                total += tl.where(allowed, tl.exp(scores - top), 0.0)
            if top + tl.log(tl.sum(total, axis=0)) > text:
                for start in range(0, first, TILE):
                    ids = start + tl.arange(0, TILE)
                    tl.store(own_ptr + ids, nothing, mask=ids < first)


def hold_transcripts_reference(
    logits: torch.Tensor, tables: TranscriptTables, stand: TranscriptRows
) -> torch.Tensor:
    """The PyTorch reference of :func:`hold_transcripts`."""
    out = logits.to(torch.float32, copy=True)
    newest = stand.ids[stand.places]
    for i, place in enumerate(stand.sets.tolist()):
        if place < 0:
            continue
        words = tables.masks[place].cpu().numpy().view(np.uint8)
        ruled_out = np.flatnonzero(np.unpackbits(words, count=out.shape[1], bitorder="little") == 0)
        out[i].index_fill_(0, torch.from_numpy(ruled_out).to(out.device), -torch.inf)
        first, end = tables.bounds[place // 2].tolist()
        if place % 2:
            last, paired, after = int(stand.last_times[i]), bool(stand.paired[i]), int(newest[i]) >= first
            if after and paired:  # timestamps come in pairs, unless the text ends
                out[i, first:] = -torch.inf
            elif after:
                out[i, :end] = -torch.inf
            last = int(newest[i]) if after else last
            if last >= first:  # they never fall, and no pair has length 0
                out[i, first : last + (not after or paired)] = -torch.inf
        text, times = out[i, :first], out[i, first:]
        if len(times) and bool(times.max() < torch.inf) and bool(times.logsumexp(0) > text.max()):
            text.fill_(-torch.inf)
    return out


def hold_transcripts(
    logits: torch.Tensor,
    tables: TranscriptTables,
    stand: TranscriptRows,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """The logits with -inf for tokens that each row's transcript rules out.

    The rules are OpenAI's ``SuppressTokens``, ``SuppressBlank`` and ``ApplyTimestampRules``. Those of the
    first place are all in its mask, except for the last: if all timestamps together are likelier than each
    other token, only timestamps stay. NaN or an infinite timestamp decides nothing there.

    Args:
        logits: [B, V] fp16, bf16 or fp32; rows may lie apart.
        tiles: choices over ``TILES``.

    Returns:
        [B, V] float32; a row's bits do not depend on the other rows.
    """
    expect_rows("logits", logits)
    rows, vocab = logits.shape
    masks, bounds = tables
    expect("masks", masks, (None, triton.cdiv(vocab, 32)), like=logits, dtype=torch.int32)
    expect("bounds", bounds, (masks.shape[0] // 2, 2), like=logits, dtype=torch.int64)
    expect_contiguous("masks", masks)
    expect_contiguous("bounds", bounds)
    for name, column in zip(stand._fields, stand, strict=True):
        expect(name, column, (None if name == "ids" else rows,), like=logits, dtype=torch.int64)
    if not runs_on_gpu(logits):
        return hold_transcripts_reference(logits, tables, stand)
    choice = merge_tiles(TILES, tiles)
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if rows:
        transcript_kernel[(rows,)](
            logits, *tables, *stand, out, logits.stride(0),
            VOCAB=vocab, WORDS=masks.shape[1], TILE=choice["TILE"], num_warps=choice["num_warps"],
        )  # fmt: skip
    return out
