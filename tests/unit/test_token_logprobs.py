"""Log-probabilities as a step writes them and a request reads them."""

from __future__ import annotations

import pytest
import torch

from ingot.config.sampling_params import MAX_LOGPROBS
from ingot.runtime.sampling.token_logprobs import ROW_WIDTH, leave_logprobs, read_logprobs


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
