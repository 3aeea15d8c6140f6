"""Tokens that go from one step to the next without leaving the device.

ids = take_tokens(input_ids, feed_rows, table)
keep_tokens(token_ids, values, table, counts, slots, Sent(host, side))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_float, expect_range, runs_on_gpu
from ingot.kernels.sampling.token_penalties import GENERATED, expect_counts

BLOCK = 256
_GENERATED = tl.constexpr(GENERATED)
NOT_A_NUMBER = -1  # kept for a row whose logits hold NaN


class Sent(NamedTuple):
    """Where kept tokens also go: row ``side`` ([1] int32 on the device) of ``host``, [2, rows] int64 in the
    host's pinned memory.
    """

    host: torch.Tensor
    side: torch.Tensor


@triton.jit(do_not_specialize_on_alignment=("slots_ptr",))  # a row of a stack: it varies with B
def feed_tokens_kernel(
    ids_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    host_ptr: tl.tensor,
    side_ptr: tl.tensor,
    host_stride: tl.tensor,
    count: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per BLOCK tokens: with rows some are taken from the table; else all are kept and
    counted.
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
        kept = tl.where(values == values, ids, -1)  # NaN is not itself
        tl.store(table_ptr + lane, kept, mask=inside)
        if host_ptr is not None:
            tl.store(host_ptr + tl.load(side_ptr) * host_stride + lane, kept, mask=inside)
        if counts_ptr is not None:
            slots = tl.load(slots_ptr + lane, mask=inside, other=-1)
            places = counts_ptr + slots * vocab + ids  # no two rows share a slot
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
    sent: Sent | None = None,
) -> None:
    host, side, stride = (None, None, 0) if sent is None else (*sent, sent.host.stride(0))
    count, vocab = ids.shape[0], 0 if counts is None else counts.shape[1]
    if count:
        feed_tokens_kernel[(triton.cdiv(count, BLOCK),)](
            *(ids, rows, values, table, out, counts, slots, host, side, stride, count, vocab),
            BLOCK=BLOCK,
            num_warps=2,
        )


def take_tokens(input_ids: torch.Tensor, feed_rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The ids of a step's tokens [T]: ``table[feed_rows]``, or ``input_ids`` where the row is -1.

    All are int64; ``table`` [rows] is what ``keep_tokens`` left, and NOT_A_NUMBER is read as 0.
    """
    expect("input_ids", input_ids, (None,), like=input_ids, dtype=torch.int64)
    expect("feed_rows", feed_rows, (input_ids.shape[0],), like=input_ids, dtype=torch.int64)
    expect("table", table, (None,), like=input_ids, dtype=torch.int64)
    if not runs_on_gpu(input_ids):
        fed = table[feed_rows.clamp_min(0)].clamp_min(0)
        return torch.where(feed_rows >= 0, fed, input_ids)
    out = torch.empty_like(input_ids)
    _launch(input_ids, feed_rows, None, table, out)
    return out


def keep_tokens(
    token_ids: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    sent: Sent | None = None,
) -> None:
    """Keep the tokens that a step chose in ``table[:B]``, NOT_A_NUMBER for a row whose value is NaN.

    Args:
        token_ids: [B] int64.
        values: [B] float, the logits of these tokens.
        table: [at least B] int64, written.
        counts: [slots, V] int16 or int32, as of ``penalize``: each token is counted in its row's slot.
        slots: [B] int64, with ``counts``; each slot once, -1 for rows without.
        sent: where the host reads them, too, once the step has ended.
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
    if sent is not None:
        _expect_sent(sent, token_ids)
    if runs_on_gpu(token_ids):
        _launch(token_ids, None, values, table, None, counts, slots, sent)
        return
    kept = torch.where(values.isnan(), NOT_A_NUMBER, token_ids)
    table[: len(kept)] = kept
    if sent is not None:
        sent.host[int(sent.side), : len(kept)] = kept
    if counts is not None and slots is not None:
        counts[slots[slots >= 0], token_ids[slots >= 0]] += GENERATED


def _expect_sent(sent: Sent, token_ids: torch.Tensor) -> None:
    expect("the host's tokens", sent.host, (2, None), like=sent.host, dtype=torch.int64)
    expect_range("the host's rows", sent.host.shape[1], token_ids.shape[0])
    expect("side", sent.side, (1,), like=token_ids, dtype=torch.int32)
    if token_ids.is_cuda and not sent.host.is_pinned():
        raise KernelArgumentError("a GPU cannot write there", seen="pageable memory", allowed="pinned memory")
