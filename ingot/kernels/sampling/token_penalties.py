"""Biases, penalties and bans on rows of logits, from tables of each request's tokens.

Some tokens have a bias; repetition, presence and frequency are penalized; end tokens are banned while an
answer is too short. ``counts`` has a row (a slot) per request with such rules, and an integer per token of
the vocabulary: GENERATED times how often the request generated it, plus IN_PROMPT if it is in the prompt,
plus ENDS if it is an end token that may be banned. ``BiasTable`` has the biased tokens of each slot. The
launch depends on batch and vocabulary alone, so a CUDA graph can hold it.

    rows = penalize(logits, counts, slots, repetition, presence, frequency, min_new, step)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect,
    expect_contiguous,
    expect_rows,
    merge_tiles,
    runs_on_gpu,
)

IN_PROMPT, ENDS, GENERATED = 1, 2, 4
COUNT_DTYPES = (torch.int16, torch.int32)
_IN_PROMPT, _ENDS, _GENERATED = tl.constexpr(IN_PROMPT), tl.constexpr(ENDS), tl.constexpr(GENERATED)
# Rows of a stack: their alignment varies with B.
PLACES = (
    *("slot_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr", "min_new_ptr", "step_ptr"),
    "biased_ptr",
)
# Not measured: 8 logits per thread make loads and stores of 16 bytes.
TILES = {"TILE": 1024, "PROGRAMS": 4096, "num_warps": 4}


class BiasTable(NamedTuple):
    """The biased tokens of each slot.

    Attributes:
        ids: [slots, K] int32, contiguous, K a power of two; ascending, without repetition.
        values: [slots, K] float64, contiguous, added to their logits.
    """

    ids: torch.Tensor
    values: torch.Tensor


def count_dtype(most_tokens: int) -> torch.dtype:
    """The narrowest dtype for a table whose requests generate up to so many tokens."""
    return torch.int16 if most_tokens * GENERATED < 2**15 else torch.int32


def _expect_bias(bias: BiasTable, biased: torch.Tensor | None, slots: int, rows: int) -> None:
    width = bias.ids.shape[-1]
    expect("bias.ids", bias.ids, (slots, None), like=bias.ids, dtype=torch.int32)
    expect("bias.values", bias.values, (slots, width), like=bias.ids, dtype=torch.float64)
    expect_contiguous("bias.ids", bias.ids)
    expect_contiguous("bias.values", bias.values)
    if not width or width & (width - 1):
        raise KernelArgumentError("bias has a wrong width", seen=width, allowed="a power of two")
    if biased is None:
        raise KernelArgumentError("biased is missing", seen=None, allowed="biased tokens per row")
    expect("biased", biased, (rows,), like=bias.ids, dtype=torch.int64)


def expect_counts(counts: torch.Tensor, vocab: int | None, *, like: torch.Tensor) -> None:
    """Raise unless ``counts`` is a contiguous [slots, vocab] table (None: any width)."""
    if counts.dtype not in COUNT_DTYPES:
        raise KernelArgumentError("counts has the wrong dtype", seen=counts.dtype, allowed=COUNT_DTYPES)
    expect("counts", counts, (None, vocab), like=like, dtype=counts.dtype)
    expect_contiguous("counts", counts)


@triton.jit
def _add_bias(
    scores: tl.tensor,
    ids: tl.tensor,
    start: tl.tensor,
    ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    count: tl.tensor,
    BIASES: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Scores of a tile from token ``start`` on, plus the bias of the slot's tokens in it, rounded once."""
    places = tl.arange(0, BIASES)
    listed = places < count
    tokens = tl.load(ids_ptr + places, mask=listed, other=0)
    first = tl.sum((listed & (tokens < start)).to(tl.int32), axis=0)
    end = tl.sum((listed & (tokens < start + TILE)).to(tl.int32), axis=0)
    for place in range(first, end):
        token = tl.load(ids_ptr + place)
        value = tl.load(values_ptr + place)
        scores = tl.where(ids == token, (scores.to(tl.float64) + value).to(tl.float32), scores)
    return scores


@triton.jit(do_not_specialize_on_alignment=PLACES)
def penalize_kernel(
    logits_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    min_new_ptr: tl.tensor,
    step_ptr: tl.tensor,
    biased_ptr: tl.tensor,
    bias_ids_ptr: tl.tensor,
    bias_values_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BIASES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """TILE logits of a row at a time, widened and, if the row has a slot, changed by its rules."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    repetition = tl.load(repetition_ptr + row).to(tl.float32)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    bans = tl.load(step_ptr + row) < tl.load(min_new_ptr + row)
    for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < VOCAB
        scores = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=0.0).to(tl.float32)
        if slot >= 0:
            if bias_ids_ptr is not None:
                biased = tl.load(biased_ptr + row).to(tl.int32)
                if biased > 0:
                    own_ids, own_values = bias_ids_ptr + slot * BIASES, bias_values_ptr + slot * BIASES
                    scores = _add_bias(scores, ids, tile * TILE, own_ids, own_values, biased, BIASES, TILE)
            state = tl.load(counts_ptr + slot * VOCAB + ids, mask=inside, other=0).to(tl.int32)
            repeated = tl.where(scores < 0, scores * repetition, tl.div_rn(scores, repetition))
            scores = tl.where((state & ~_ENDS) != 0, repeated, scores)
            count = state // _GENERATED
            penalty = (presence + frequency * count.to(tl.float64)).to(tl.float32)
            scores = tl.where(count > 0, scores - penalty, scores)
            scores = tl.where(bans & ((state & _ENDS) != 0), float("-inf"), scores)
        tl.store(out_ptr + row * VOCAB + ids, scores, mask=inside)


def penalize_reference(
    logits: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    min_new: torch.Tensor,
    step: torch.Tensor,
    bias: BiasTable | None = None,
    biased: torch.Tensor | None = None,
) -> torch.Tensor:
    """The PyTorch reference of :func:`penalize`; touches only the tokens in a row's table."""
    out = logits.to(torch.float32, copy=True)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        if bias is not None and biased is not None:
            own = int(biased[row])
            ids = bias.ids[slot, :own].long()
            out[row, ids] = (out[row, ids].double() + bias.values[slot, :own]).float()
        ids = counts[slot].nonzero().squeeze(1)
        state, scores = counts[slot, ids].int(), out[row, ids]
        penalty = repetition[row].float()
        repeated = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where((state & ~ENDS) != 0, repeated, scores)
        count = state // GENERATED
        lost = (presence[row] + frequency[row] * count.double()).float()
        scores = torch.where(count > 0, scores - lost, scores)
        out[row, ids] = scores.masked_fill((step[row] < min_new[row]) & ((state & ENDS) != 0), -torch.inf)
    return out


def penalize(
    logits: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    min_new: torch.Tensor,
    step: torch.Tensor,
    bias: BiasTable | None = None,
    biased: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """The logits changed by each row's rules, in this order:

    - bias: each of the slot's biased tokens gains its value (as in vLLM and Hugging Face);
    - repetition: of every token of prompt and output, once each, a score s < 0 becomes s * penalty, others
      s / penalty (CTRL, https://arxiv.org/abs/1909.05858, with Hugging Face's sign rule; 1: off);
    - presence and frequency: a token generated c > 0 times loses presence + frequency * c (the OpenAI API's
      definition; 0: off);
    - end tokens become -inf while ``step < min_new``.

    Args:
        logits: [B, V] fp16, bf16 or fp32; rows may lie apart.
        counts: [slots, V] int16 or int32, see the module.
        slots: [B] int64, row of ``counts``; -1: the row has no rules, and its other values are not used.
        repetition, presence, frequency: [B] float64.
        min_new, step: [B] int64; step counts the generated tokens.
        bias: of as many slots as ``counts``.
        biased: [B] int64, with ``bias``: biased tokens of the row's slot.
        tiles: choices over ``TILES``.

    Returns:
        [B, V] float32, with the same bits on every device.
    """
    expect_rows("logits", logits)
    rows, vocab = logits.shape
    expect_counts(counts, vocab, like=logits)
    for name, tensor in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        expect(name, tensor, (rows,), like=logits, dtype=torch.float64)
    for name, tensor in (("slots", slots), ("min_new", min_new), ("step", step)):
        expect(name, tensor, (rows,), like=logits, dtype=torch.int64)
    if bias is not None:
        _expect_bias(bias, biased, counts.shape[0], rows)
    rules = (counts, slots, repetition, presence, frequency, min_new, step)
    if not runs_on_gpu(logits):
        return penalize_reference(logits, *rules, bias, biased)
    choice = merge_tiles(TILES, tiles)
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if rows:
        count = triton.cdiv(vocab, choice["TILE"])
        bias_ids, bias_values = (None, None) if bias is None else bias
        penalize_kernel[(min(count, max(choice["PROGRAMS"] // rows, 1)), rows)](
            logits, *rules, biased, bias_ids, bias_values, out, logits.stride(0),
            VOCAB=vocab, TILES=count, BIASES=1 if bias_ids is None else bias_ids.shape[1],
            TILE=choice["TILE"], num_warps=choice["num_warps"],
            enable_fp_fusion=False,  # the reference rounds the product of frequency and count
        )  # fmt: skip
    return out
