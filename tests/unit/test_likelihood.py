"""What is kept of a prompt's logits and hidden states, compared with PyTorch over the full prompt."""

from __future__ import annotations

import pytest
import torch

from ingot.runtime.likelihood import keep_last, keep_likelihood, keep_logits, keep_sum

VOCAB, IDS = 11, [3, 9, 0, 10, 5, 2]
CHUNKS = ([6], [1] * 6, [2, 3, 1], [5, 1])


def logits() -> torch.Tensor:
    return torch.randn(len(IDS), VOCAB, generator=torch.Generator().manual_seed(3)) * 4


@pytest.mark.parametrize("below", [None, VOCAB, 10, 9, 1])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_each_token_is_scored_by_the_logits_before_it(chunks: list[int], below: int | None) -> None:
    """Among the ids below a limit alone, of which those beyond are none; nothing follows the last token."""
    keep, rows = keep_likelihood(IDS, below), logits()
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    found = torch.cat([keep(rows[at : at + size], at) for at, size in zip(starts, chunks, strict=True)])
    wanted = rows[:, :below].double().log_softmax(-1)
    known = [
        float(wanted[i, token]) if token < wanted.shape[1] else -torch.inf for i, token in enumerate(IDS[1:])
    ]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(known), rtol=1e-5, atol=1e-5)


def test_hidden_states_are_kept_in_fp32() -> None:
    """A sum of many in 16 bits would lose the small ones."""
    hidden = torch.full((3000, 2), 1.0).bfloat16()
    hidden[-1] = 2.0
    assert keep_sum(hidden, 0).tolist() == [[3001.0, 3001.0]]
    kept = keep_last(hidden, 7)
    assert (kept.dtype, kept.tolist(), kept.untyped_storage().nbytes()) == (torch.float32, [[2.0, 2.0]], 8)
    whole = keep_logits(hidden, 7)
    assert (whole.dtype, whole.shape) == (torch.float32, (3000, 2))
