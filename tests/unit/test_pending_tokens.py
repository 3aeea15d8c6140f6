"""Tokens on their way to the host."""

from __future__ import annotations

import torch

from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import RowSampling, SamplingTensors
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.step.sampled_step import leave_tokens

CPU = torch.device("cpu")


def test_tokens_of_a_step_outlive_the_next_one() -> None:
    """The host reads one step behind, and a step ends while the next one is already sent."""
    feed, vocab = TokenFeed(4, TokenCounts(4, 50, 16, CPU)), 50
    draws = SamplingTensors.from_rows([RowSampling()] * 3, CPU)
    steps = [torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    wanted = [logits.argmax(-1).tolist() for logits in steps]
    before = None
    for step, logits in enumerate(steps):
        leave_tokens(logits, draws, feed)
        now = feed.send(3)
        assert feed.table[:3].tolist() == wanted[step]
        if before is not None:
            assert before.wait() == (wanted[step - 1], None)
        before = now
    assert before is not None
    assert before.wait() == (wanted[-1], None)
