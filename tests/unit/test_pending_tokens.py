"""Tokens on their way to the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import RowSampling, SamplingTensors
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.step.sampled_step import leave_tokens
from tests.unit.fake_gpu import LateGpu

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


@pytest.mark.parametrize("logprobs", [False, True])
def test_tokens_are_read_when_their_step_is_done(logprobs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is late: it writes a step's tokens no sooner than somebody waits for them."""
    gpu = LateGpu(monkeypatch, "ingot.runtime.sampling.pending_tokens")
    counts: Any = SimpleNamespace(device=torch.device("cuda"), max_requests=4, vocab_size=50)
    feed = TokenFeed(4, counts)
    before = None
    for step in range(5):
        tokens, turn = [10 * step + row for row in range(3)], feed.turn
        gpu.work.append(lambda tokens=tokens, turn=turn: feed.sent.host[turn, :3].copy_(torch.tensor(tokens)))
        now = feed.send(3, logprobs=logprobs)
        if before is not None:
            found, rows = before.wait()
            assert found == [10 * (step - 1) + row for row in range(3)]
            assert (rows is not None) == logprobs
        before = now
    assert len(gpu.work) == 1, "the last step is in flight"
