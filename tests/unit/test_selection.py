"""Tokens chosen for each request of a step, independent of other requests."""

from __future__ import annotations

from typing import Any

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.scheduling.request import Request
from ingot.runtime.selection import Choice, TokenSelector

VOCAB = 16
LOGITS = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 3


def select(*params: SamplingParams) -> list[Choice]:
    requests = [Request(f"r{i}", [3, 5], each, 9, output_ids=[5]) for i, each in enumerate(params)]
    counts = TokenCounts(len(params), VOCAB, 9, torch.device("cpu"))
    return TokenSelector(frozenset(), counts).select(requests, LOGITS[: len(params)].clone())


def test_log_probabilities_are_the_model_s_own() -> None:
    """A penalty changes the choice, not the reported log-probability."""
    (choice,) = select(SamplingParams(repetition_penalty=50.0, logprobs=4))
    expected = LOGITS[0].log_softmax(-1)
    assert choice.logprobs is not None
    top = expected.topk(4)
    assert [token for token, _ in choice.logprobs.top] == top.indices.tolist()
    torch.testing.assert_close(torch.tensor([value for _, value in choice.logprobs.top]), top.values)
    assert abs(choice.logprobs.logprob - float(expected[choice.token_id])) < 1e-6


def test_each_gets_as_many_likeliest_tokens_as_it_asked_for() -> None:
    choices = select(SamplingParams(logprobs=4), SamplingParams(logprobs=1), SamplingParams())
    reported = [None if choice.logprobs is None else len(choice.logprobs.top) for choice in choices]
    assert reported == [4, 1, None]
    assert [choice.token_id for choice in choices] == LOGITS.argmax(-1).tolist()


def test_each_rule_alone_is_one() -> None:
    """A row without rules beside it has none of them."""
    best = int(LOGITS[0].argmax())
    rules: list[dict[str, Any]] = [
        {"logit_bias": {7: 50.0}},
        {"repetition_penalty": 9.0},
        {"presence_penalty": 2.0},
    ]
    rules += [{"frequency_penalty": 2.0}, {"min_new_tokens": 3, "stop_token_ids": (best,)}]
    for rule in rules:
        request = Request("r", [best], SamplingParams(**rule), 9, output_ids=[best])
        beside = Request("s", [best], SamplingParams(), 9, output_ids=[best])
        counts = TokenCounts(2, VOCAB, 9, torch.device("cpu"))
        first, second = TokenSelector(frozenset(), counts).select([request, beside], LOGITS[[0, 0]].clone())
        assert (first.token_id == best, second.token_id) == (False, best), rule
    assert select(SamplingParams(logit_bias={7: 50.0}))[0].token_id == 7


def test_processors_of_a_request_get_all_its_ids_after_the_penalties() -> None:
    seen = []

    def ban_best(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((ids, logits.clone()))
        return logits.index_fill(0, logits.argmax()[None], -torch.inf)

    params = SamplingParams(presence_penalty=2.0, logits_processors=(ban_best, ban_best))
    first, second = select(params, SamplingParams())
    penalised = LOGITS[0].clone()
    penalised[5] -= 2.0
    assert first.token_id == penalised.topk(3).indices[2]
    assert second.token_id == LOGITS[1].argmax()
    assert seen[0][0] == [3, 5, 5]
    torch.testing.assert_close(seen[0][1], penalised)


def test_a_processor_that_fails_fails_its_request_alone() -> None:
    def failing(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError(ids[0])

    def narrow(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[:4]

    def nothing(ids: list[int], logits: torch.Tensor) -> None:
        logits.zero_()

    odd = [SamplingParams(logits_processors=(one,)) for one in (failing, narrow, nothing)]
    reported = [str(select(one)[0].error) for one in odd]
    assert "failing failed" in reported[0]
    assert "KeyError(3)" in reported[0]
    assert "narrow did not return logits" in reported[1]
    assert "nothing did not return logits" in reported[2]
    choices = select(odd[0], SamplingParams())
    assert [choice.error is None for choice in choices] == [False, True]
    assert choices[1].token_id == LOGITS[1].argmax()
