"""Requests with a grammar among others: which ones wait, and their masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ingot.config.grammar_spec import Grammar
from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.runtime.executor import Executor, Update
from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import RowSampling, SamplingTensors
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.scheduling.request import Request
from ingot.runtime.step.graphs import KINDS
from ingot.runtime.step.sampled_step import leave_tokens
from tests.unit.fake_executor import VOCAB, FakeRunner, check_empty, fake_executor
from tests.unit.fake_matcher import AtOnce, FakeMatcher, Later

PROMPT = [1, 2, 3]
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
DRAWN = GREEDY.replace(temperature=1.0, seed=3)


def made(threads: Any = None, **sizes: Any) -> tuple[Executor, FakeRunner]:
    executor, runner = fake_executor(run_ahead=True, **sizes)
    executor.masks._threads = AtOnce() if threads is None else threads
    return executor, runner


def drain(executor: Executor) -> list[Update]:
    news = []
    while executor.has_work:
        news += executor.step()
    check_empty(executor)
    return news


def ids_of(news: Sequence[Update], name: str, index: int = 0) -> list[int]:
    return [i for one in news if (one.request_id, one.index) == (name, index) for i in one.token_ids]


def names(runner: FakeRunner) -> list[set[str]]:
    return [{item.request.request_id for item in step.requests} for step in runner.steps]


def test_others_have_every_step_and_it_has_every_second() -> None:
    executor, runner = made()
    executor.add("free", PROMPT, DRAWN)
    executor.add("held", PROMPT, DRAWN, matcher=FakeMatcher(VOCAB, 1))
    news = drain(executor)
    assert runner.ahead == len(runner.steps)
    assert names(runner)[:8] == [{"free", "held"}, {"free"}] * 4
    matcher, held = FakeMatcher(VOCAB, 1), ids_of(news, "held")
    assert len(held) == len(ids_of(news, "free")) == 8
    assert all(token in matcher.allowed(held[:i]) for i, token in enumerate(held))
    assert ids_of(news, "free") != held


def test_a_slow_mask_does_not_delay_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Later()
    executor, runner = made(threads)
    hold = executor.masks.hold

    def briefly(requests: Sequence[Request], seconds: float | None) -> list[tuple[Request, RequestError]]:
        assert seconds is not None
        assert seconds <= 0.001
        return hold(requests, seconds)

    monkeypatch.setattr(executor.masks, "hold", briefly)
    executor.add("free", PROMPT, GREEDY)
    assert executor.step() == []
    executor.add("held", PROMPT, GREEDY, matcher=FakeMatcher(VOCAB, 1))
    for _ in range(3):
        assert [one.request_id for one in executor.step()] == ["free"]
    assert names(runner) == [{"free"}] * 4
    threads.work()
    executor.step()
    assert names(runner)[-1] == {"free", "held"}
    executor.abort("held")
    assert executor.masks.num_held == 0
    assert len(ids_of(drain(executor), "free")) == 4


@pytest.mark.parametrize("free", [0, 1])
def test_if_most_have_grammars_all_run_in_one_step(free: int) -> None:
    """A token of each in every step: none waits for the other half of them."""
    executor, runner = made()
    for i in range(3):
        executor.add(f"held{i}", PROMPT, GREEDY, matcher=FakeMatcher(VOCAB, i))
    for i in range(free):
        executor.add(f"free{i}", PROMPT, GREEDY)
    drain(executor)
    assert len(runner.steps) == 8
    assert runner.ahead == 8, "they draw inside the step all the same"


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_grammar_that_fails_ends_its_answer_alone(run_ahead: bool) -> None:
    executor, _ = made()
    executor.run_ahead = run_ahead
    executor.add("free", PROMPT, GREEDY)
    executor.add("held", PROMPT, DRAWN.replace(n=2), matcher=FakeMatcher(VOCAB, 1))
    executor.add("dead", PROMPT, GREEDY, matcher=FakeMatcher(VOCAB, 1, dead_end=2))
    executor.add("none", PROMPT, GREEDY, matcher=FakeMatcher(VOCAB, 1, dead_end=0))
    executor.add("beams", PROMPT, GREEDY.replace(num_beams=2), matcher=FakeMatcher(VOCAB, 1, dead_end=2))
    news = drain(executor)
    errors = {one.request_id: str(one.error) for one in news if one.error is not None}
    assert errors.keys() == {"dead", "none", "beams"}
    assert sum(one.error is not None for one in news) == 3
    assert "after 2 tokens" in errors["dead"]
    assert [len(ids_of(news, name)) for name in ("free", "dead", "none", "beams")] == [8, 2, 0, 0]
    assert [len(ids_of(news, "held", i)) for i in range(2)] == [8, 8]


def test_an_unexpected_matcher_error_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, _ = made()
    matcher = FakeMatcher(VOCAB, 1)
    monkeypatch.setattr(FakeMatcher, "mask_into", lambda *_: 1 / 0)
    executor.add("free", PROMPT, GREEDY)
    executor.add("held", PROMPT, GREEDY, matcher=matcher)
    news = drain(executor)
    (error,) = (one.error for one in news if one.error is not None)
    assert "ZeroDivisionError: division by zero" in str(error)
    assert (len(ids_of(news, "free")), ids_of(news, "held")) == (8, [])


def test_a_prepared_grammar_is_not_compiled_in_the_loop() -> None:
    """``add`` compiles a grammar only if needed: an executor without grammars refuses to."""

    executor, _ = made()
    params = GREEDY.replace(grammar=Grammar.regex("a"), ignore_eos=False, stop_token_ids=(5,))
    with pytest.raises(RequestError, match="no tokenizer"):
        executor.add("r", PROMPT, params)
    executor.add("r", PROMPT, params, matcher=FakeMatcher(VOCAB, 4))
    assert drain(executor)


@pytest.mark.parametrize("values", [GREEDY, DRAWN.replace(logprobs=3), DRAWN.replace(logit_bias={4: 2.0})])
def test_an_answer_is_the_same_in_either_order(values: SamplingParams) -> None:
    """With penalties and log-probabilities; its neighbours' too, whether it is there or not."""
    held = values.replace(repetition_penalty=1.4, frequency_penalty=0.3, n=2)
    found = []
    for run_ahead, there in ((False, True), (True, True), (True, False)):
        executor, _ = made(num_blocks=16)
        executor.run_ahead = run_ahead
        for i in range(5):
            executor.add(f"free{i}", PROMPT, values.replace(seed=i, min_new_tokens=3))
        if there:
            executor.add("held", PROMPT, held, matcher=FakeMatcher(VOCAB, 9))
        news = drain(executor)
        reported: dict[str, list[Any]] = {one.request_id: [] for one in news}
        for one in news:
            reported[one.request_id] += [(one.index, one.token_ids, one.logprobs, one.finish_reason)]
        found.append({name: sorted(list_, key=lambda n: n[0]) for name, list_ in reported.items()})
    assert found[0] == found[1]
    assert {name: reported for name, reported in found[1].items() if name != "held"} == found[2]


@pytest.mark.parametrize("kind", ["masked", "logprobs"])
def test_rows_next_to_a_masked_row_keep_their_bits(kind: str) -> None:
    """As a graph of this kind samples them."""
    counts = TokenCounts(8, VOCAB, 99, torch.device("cpu"))
    feed = TokenFeed(8, counts)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for masked in (False, True):
        drawn = RowSampling(temperature=0.7, top_p=0.9)
        rows = [drawn._replace(seed=i, mask=0 if masked and i == 2 else -1) for i in range(4)]
        tensors = SamplingTensors.from_rows([*rows, *KINDS[kind]], "cpu")  # its flags, and the rows' values
        fields = {name: one[:4] if torch.is_tensor(one) else one for name, one in vars(tensors).items()}
        feed.masks.table[0] = 1 << 7
        feed.logprobs.zero_()
        with torch.inference_mode():
            leave_tokens(logits, SamplingTensors(**fields), feed)
        found.append((feed.table[:4].tolist(), feed.logprobs[:4].clone()))
    (plain, plain_reported), (beside, beside_reported) = found
    others = [0, 1, 3]
    assert beside[2] == 7 != plain[2]
    assert [beside[i] for i in others] == [plain[i] for i in others]
    assert torch.equal(beside_reported[others], plain_reported[others])
    assert bool(plain_reported.any()) == (kind == "logprobs")
