"""Tokens that go from one step to the next without leaving the device.

Owns the two ends of that way: the ids that a step reads, some of them chosen by the step before, and the ids
that it leaves behind, counted where later steps penalize them. Knows no sampler and no request.

    ids = take_tokens(input_ids, feed_rows, table)
    keep_tokens(token_ids, values, table, counts, slots)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import expect, expect_float, expect_range, runs_on_gpu
from ingot.kernels.sampling.token_penalties import GENERATED, expect_counts

BLOCK = 256
_GENERATED = tl.constexpr(GENERATED)
NOT_A_NUMBER = -1  # what is kept of a row whose logits hold NaN


@triton.jit(do_not_specialize_on_alignment=("slots_ptr",))  # a row of a stack: it varies with B
def feed_tokens_kernel(
    ids_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    count: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK tokens a program: with rows some are taken from the table, without all are kept in it, and with
    counts counted.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    ids = tl.load(ids_ptr + lane, mask=inside, other=0)
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + lane, mask=inside, other=-1)
        fed = tl.load(table_ptr + rows, mask=rows >= 0, other=0)
        tl.store(out_ptr + lane, tl.where(rows >= 0, tl.maximum(fed, 0), ids), mask=inside)
    else:
        values = tl.load(values_ptr + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(table_ptr + lane, tl.where(values == values, ids, -1), mask=inside)  # NaN is not itself
        if counts_ptr is not None:
            slots = tl.load(slots_ptr + lane, mask=inside, other=-1)
            places = counts_ptr + slots * vocab + ids  # no two rows have one slot
            known = tl.load(places, mask=slots >= 0, other=0)
            tl.store(places, known + _GENERATED, mask=slots >= 0)


def _launch(
    ids: torch.Tensor,
    rows: torch.Tensor | None,
    values: torch.Tensor | None,
    table: torch.Tensor,
    out: torch.Tensor | None,
    counts: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    count, vocab = ids.shape[0], 0 if counts is None else counts.shape[1]
    if count:
        feed_tokens_kernel[(triton.cdiv(count, BLOCK),)](
            ids, rows, values, table, out, counts, slots, count, vocab, BLOCK=BLOCK, num_warps=2
        )


def take_tokens_triton(input_ids: torch.Tensor, feed_rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`take_tokens`, unchecked."""
    out = torch.empty_like(input_ids)
    _launch(input_ids, feed_rows, None, table, out)
    return out


def keep_tokens_triton(
    token_ids: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Launch the kernel; arguments as in :func:`keep_tokens`, unchecked."""
    _launch(token_ids, None, values, table, None, counts, slots)


def take_tokens_reference(
    input_ids: torch.Tensor, feed_rows: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """The PyTorch reference; arguments as in :func:`take_tokens`."""
    fed = table[feed_rows.clamp_min(0)].clamp_min(0)
    return torch.where(feed_rows >= 0, fed, input_ids)


def keep_tokens_reference(
    token_ids: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """The PyTorch reference; arguments as in :func:`keep_tokens`."""
    table[: token_ids.shape[0]] = torch.where(values.isnan(), NOT_A_NUMBER, token_ids)
    if counts is not None and slots is not None:
        counts[slots[slots >= 0], token_ids[slots >= 0]] += GENERATED


def take_tokens(input_ids: torch.Tensor, feed_rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The ids of a step's tokens: ``table[feed_rows]`` where a row is named, ``input_ids`` where it is -1.

    Args:
        input_ids: [T] int64.
        feed_rows: [T] int64, rows of ``table``, or -1.
        table: [rows] int64, what ``keep_tokens`` left; NOT_A_NUMBER is read as 0.

    Returns:
        [T] int64.

    Raises:
        KernelArgumentError: a shape, dtype or device that does not fit.
    """
    expect("input_ids", input_ids, (None,), like=input_ids, dtype=torch.int64)
    expect("feed_rows", feed_rows, (input_ids.shape[0],), like=input_ids, dtype=torch.int64)
    expect("table", table, (None,), like=input_ids, dtype=torch.int64)
    if runs_on_gpu(input_ids):
        return take_tokens_triton(input_ids, feed_rows, table)
    return take_tokens_reference(input_ids, feed_rows, table)


def keep_tokens(
    token_ids: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Leave the tokens that a step chose in ``table[:B]``, NOT_A_NUMBER for a row whose value is NaN.

    Args:
        token_ids: [B] int64.
        values: [B] float, the logits of these tokens.
        table: [at least B] int64, written to.
        counts: [slots, V] int16 or int32, as ``penalize`` reads it: each token is counted in its row's slot.
        slots: [B] int64, with ``counts``; each slot once, -1 for rows that have none.

    Raises:
        KernelArgumentError: a shape, dtype or device that does not fit.
    """
    expect("token_ids", token_ids, (None,), like=token_ids, dtype=torch.int64)
    expect_float("values", values)
    expect("values", values, (token_ids.shape[0],), like=token_ids, dtype=values.dtype)
    expect("table", table, (None,), like=token_ids, dtype=torch.int64)
    expect_range("the table's rows", table.shape[0], token_ids.shape[0])
    if counts is not None:
        assert slots is not None, "counts come with slots"
        expect_counts(counts, None, like=token_ids)
        expect("slots", slots, (token_ids.shape[0],), like=token_ids, dtype=torch.int64)
    keep = keep_tokens_triton if runs_on_gpu(token_ids) else keep_tokens_reference
    keep(token_ids, values, table, counts, slots)
