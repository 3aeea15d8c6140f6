"""A sampled step: feed → model → transcripts → penalties → masks → sampler → feed, in one CUDA graph."""

from __future__ import annotations

import dataclasses

import torch

from ingot.kernels.sampling.feed_tokens import keep_tokens, take_tokens
from ingot.kernels.sampling.masked_tokens import mask_tokens
from ingot.layers.forward_batch import ForwardBatch
from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import Newest, SamplingTensors, sample
from ingot.runtime.sampling.token_logprobs import NARROW_WIDTH, leave_greedy, leave_logprobs
from ingot.runtime.step.chosen_products import Forward


def sampled_step(
    forward: Forward,
    batch: ForwardBatch,
    feed_rows: torch.Tensor,
    draws: SamplingTensors,
    feed: TokenFeed,
) -> None:
    """Compute a step and leave a token for each of its logits rows in the feed, as ``leave_tokens``.

    Args:
        batch: ``input_ids`` hold the tokens that the host knows.
        feed_rows: [T] int64: row of the feed's table that holds the token's id, -1 for one that the host
            knows.
        draws: how each of the L rows of logits draws.
        feed: with room for at least L rows; read first, written last.
    """
    ids = take_tokens(batch.input_ids, feed_rows, feed.table)
    logits = forward(dataclasses.replace(batch, input_ids=ids))
    leave_tokens(logits, draws, feed, Newest(ids, batch.logits_indices))


def leave_tokens(
    logits: torch.Tensor, draws: SamplingTensors, feed: TokenFeed, newest: Newest | None = None
) -> None:
    """Choose a token for each of L rows of logits, [L, vocab_size]: leave it in the feed's ``table[:L]``,
    count it where its row has a slot, and leave log-probabilities in ``logprobs[:L]`` if some row wants them.
    ``newest``: the tokens that the step read, for transcripts.
    """
    if not logits.shape[0]:
        return
    if draws.any_transcripts:
        assert newest is not None
        logits = draws.held(logits, feed.transcripts, newest)
    counts = feed.counts.table if draws.any_rules else None
    rows = draws.penalized(logits, feed.counts) if draws.any_rules else logits
    if draws.any_masks:
        rows = logits.to(torch.float32, copy=True) if rows is logits else rows
        mask_tokens(rows, feed.masks.table, draws.mask)
    best_alone = rows is logits and draws.all_greedy and draws.any_logprobs and not draws.any_probes
    chosen = leave_greedy(logits, _width(draws, feed.logprobs)) if best_alone else sample(rows, draws)
    keep_tokens(chosen.token_ids, chosen.values, feed.table, counts, draws.slot, feed.sent)
    if draws.any_logprobs and not best_alone:
        leave_row_logprobs(logits, chosen.token_ids, draws, feed.logprobs)


def leave_row_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, draws: SamplingTensors, out: torch.Tensor
) -> None:
    """``leave_logprobs`` of drawn tokens, and of the probed ones in rows that have such."""
    if draws.any_probes:
        token_ids = torch.where(draws.probed >= 0, draws.probed, token_ids)
    leave_logprobs(logits, token_ids, _width(draws, out))


def _width(draws: SamplingTensors, out: torch.Tensor) -> torch.Tensor:
    """Rows of log-probabilities as wide as some row wants them."""
    return out if draws.any_likeliest else out[:, :NARROW_WIDTH]
