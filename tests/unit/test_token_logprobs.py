"""Log-probabilities as a step writes them and a request reads them."""

from __future__ import annotations

import pytest
import torch

from ingot.config.sampling_params import MAX_LOGPROBS
from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import RowSampling, SamplingTensors
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.sampling.token_logprobs import NARROW_WIDTH, ROW_WIDTH, leave_logprobs, read_logprobs
from ingot.runtime.step.sampled_step import leave_tokens


@pytest.mark.parametrize("wanted", [0, 1, 5, MAX_LOGPROBS])
def test_they_are_of_the_raw_logits(wanted: int) -> None:
    logits = torch.randn(6, 97, generator=torch.Generator().manual_seed(4)) * 20
    token_ids = torch.tensor([0, 96, 5, 5, 17, 40])
    expected = logits.double().log_softmax(-1)
    out = torch.zeros(8, ROW_WIDTH, dtype=torch.float64)
    leave_logprobs(logits, token_ids, out)
    assert not out[6:].any()
    for row, token in enumerate(token_ids.tolist()):
        found = read_logprobs(out[row].tolist(), token, wanted)
        assert found.token_id == token
        assert found.logprob == pytest.approx(expected[row, token].item(), rel=1e-5, abs=1e-5)
        top = expected[row].topk(wanted)
        assert [i for i, _ in found.top] == top.indices.tolist()
        assert [p for _, p in found.top] == pytest.approx(top.values.tolist(), rel=1e-5, abs=1e-5)
        assert torch.tensor(found.logprob, dtype=torch.float64).float().item() == found.logprob


def test_a_small_vocabulary_has_no_more_than_its_tokens() -> None:
    out = torch.zeros(1, ROW_WIDTH, dtype=torch.float64)
    leave_logprobs(torch.tensor([[1.0, 3.0, 1.0]]), torch.tensor([1]), out)
    found = read_logprobs(out[0].tolist(), 1, 5)
    assert [token for token, _ in found.top] == [1, 0, 2], "the lowest id first among equals"
    assert found.top[0][1] == found.logprob


def test_a_narrow_row_has_the_chosen_and_the_best_token() -> None:
    """As the first of a wide row; of NaN and of a row of -inf, too."""
    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(4)).mul(4).round()  # ties
    logits[3, 17], logits[4] = torch.nan, -torch.inf
    token_ids = torch.tensor([0, 96, 5, 17, 40])
    wide, narrow = (torch.full((6, width), 7.0, dtype=torch.float64) for width in (ROW_WIDTH, NARROW_WIDTH))
    leave_logprobs(logits, token_ids, wide)
    leave_logprobs(logits, token_ids, narrow)
    assert torch.equal(narrow[:, :2].nan_to_num(9), wide[:, :2].nan_to_num(9))
    assert torch.equal(narrow[:5, 2], logits.argmax(-1).double())
    assert (narrow[5] == 7).all()


@pytest.mark.parametrize("probed", [-1, 7])
def test_best_tokens_come_with_theirs_and_probes_with_their_own(probed: int) -> None:
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(2)) * 5
    expected = logits.double().log_softmax(-1)
    rows = [RowSampling(logprobs=True, likeliest=True)] * 2 + [RowSampling(probed=probed, logprobs=True)]
    device = torch.device("cpu")
    feed = TokenFeed(4, TokenCounts(4, 60, 16, device))
    leave_tokens(logits, SamplingTensors.from_rows(rows, device), feed)
    best = logits.argmax(-1)
    tokens, left = feed.send(3, logprobs=True).wait()
    assert left is not None
    assert tokens == best.tolist()
    wanted = [*best[:2].tolist(), probed if probed >= 0 else int(best[2])]
    for row, token in enumerate(wanted):
        found = read_logprobs(left[row], token, 4)
        assert found.logprob == pytest.approx(expected[row, token].item(), rel=1e-5, abs=1e-5)
        assert found.top[0][0] == best[row]
