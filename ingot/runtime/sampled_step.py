"""A step from the tokens it reads to the tokens it leaves, without a wait for the device.

Owns the order feed → model → sampler → feed, which a CUDA graph holds whole. Knows no request.

    sampled_step(forward, batch, feed_rows, draws, table)
"""

from __future__ import annotations

import dataclasses

import torch

from ingot.kernels.sampling.token_feed import keep_tokens, take_tokens
from ingot.layers.batch import ForwardBatch
from ingot.runtime.forward import Forward
from ingot.runtime.sampler import SamplingTensors, sample


def sampled_step(
    forward: Forward,
    batch: ForwardBatch,
    feed_rows: torch.Tensor,
    draws: SamplingTensors,
    table: torch.Tensor,
) -> None:
    """Compute a step and leave a token for each of its logits rows in ``table[:L]``.

    Args:
        forward: computes the batch's L rows of logits.
        batch: ``input_ids`` hold the tokens that the host knows.
        feed_rows: [T] int64: row of ``table`` that holds the token's id, -1 for one that the host knows.
        draws: how each of the L rows draws.
        table: [at least L] int64; read first, written last.
    """
    ids = take_tokens(batch.input_ids, feed_rows, table)
    logits = forward(dataclasses.replace(batch, input_ids=ids))
    leave_tokens(logits, draws, table)


def leave_tokens(logits: torch.Tensor, draws: SamplingTensors, table: torch.Tensor) -> None:
    """Choose a token for each of L rows of logits, [L, vocab_size], and leave it in ``table[:L]``."""
    if logits.shape[0]:
        chosen = sample(logits, draws)
        keep_tokens(chosen.token_ids, chosen.values, table)
