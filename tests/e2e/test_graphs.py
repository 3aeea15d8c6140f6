"""Prompt steps as CUDA graphs give what eager steps give; a warm-up captures what requests would wait for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime import RuntimeConfig
from ingot.config.step_sizes import batch_buckets
from ingot.errors import RequestError
from ingot.runtime.graphs import KINDS, DecodeGraphs, sampling_kind
from ingot.runtime.prompt_graphs import PromptGraphs, bucket_of
from ingot.runtime.runner import Runner
from ingot.runtime.sampler import RowSampling, SamplingTensors
from tests.e2e.watch import watch
from tests.tiny_models import random_ids, save_model, tiny_config


def step_of(*counts: int, all_logits: bool = False) -> Any:
    requests = [SimpleNamespace(count=c, request=SimpleNamespace(all_logits=all_logits)) for c in counts]
    single = next((i for i, c in enumerate(counts) if c > 1), len(counts))
    return SimpleNamespace(requests=requests, num_tokens=sum(counts), num_single=single)


def test_buckets() -> None:
    assert bucket_of(1, 1) == (16, 1)
    assert bucket_of(64, 4) == (64, 4)
    assert bucket_of(65, 5) == (128, 16)
    assert bucket_of(1025, 16) == (2048, 16)


@pytest.mark.parametrize(
    ("counts", "fits"),
    [
        ((2,), True),
        ((1024,), True),
        ((512, 100), True),
        ((1100,), False),  # padding would cost more than the launches
        ((2048,), True),
        ((2049,), False),
        ((1, 40), False),  # a decode
        ((9,) * 17, False),
    ],
)
def test_which_steps_fit(counts: tuple[int, ...], fits: bool) -> None:
    assert PromptGraphs.fits(step_of(*counts)) == fits
    assert not PromptGraphs.fits(step_of(*counts, all_logits=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_graphs_are_eager(tmp_path: Path, kind: str) -> None:
    save_model(
        tiny_config(kind, **({} if kind == "gpt2" else {"max_position_embeddings": 512})), tmp_path, seed=3
    )
    runtime = RuntimeConfig(prefix_reuse=False, token_budget=64)
    llm = LLM(tmp_path, device="cuda", compute_dtype="fp16", max_batch_size=4, runtime=runtime)
    prompts = [random_ids(n, seed=n) for n in (2, 31, 100, 17)]
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=8)
    graphs = llm.executor.runner.prompts
    assert graphs is not None
    for _ in range(3):
        replayed = llm.generate(prompts, params)
        alone = [llm.generate(prompt, params)[0] for prompt in reversed(prompts)][::-1]
    assert {tokens for tokens, _ in graphs._captured} >= {32, 64}
    ahead = llm.generate(prompts, params.replace(logprobs=None))
    assert [o.token_ids for o in ahead] == [o.token_ids for o in replayed]
    llm.executor.runner.prompts = None
    eager = llm.generate(prompts, params)
    for outputs in (replayed, alone):
        for one, other in zip(outputs, eager, strict=True):
            a, b = dict(one.logprobs[0].top), dict(other.logprobs[0].top)
            shared = [token for token in a if token in b]
            assert len(shared) >= 6
            assert torch.allclose(
                torch.tensor([a[t] for t in shared]), torch.tensor([b[t] for t in shared]), atol=0.02
            )


def test_each_size_is_captured_in_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[object] = []
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs.buckets = batch_buckets(4)
    monkeypatch.setattr(graphs, "_capture", lambda bucket, kind: captured.append((bucket, kind)))
    Runner.warm_up(SimpleNamespace(graphs=graphs), [1, 3], ["greedy", "filtered"])  # type: ignore[arg-type]
    assert captured == [(bucket, KINDS[kind]) for bucket in (1, 4) for kind in ("greedy", "filtered")]


def test_unknown_kinds_are_named(folders: dict[str, Path]) -> None:
    llm = LLM(folders["llama"], "cpu", max_batch_size=2)
    llm.warm_up([1], kinds=["greedy"])
    llm.warm_up()
    with pytest.raises(RequestError, match=r"unknown kind of sampling.*greedy, unfiltered, filtered.*kinds"):
        llm.warm_up([1], kinds=["greedy", "beams"])


@pytest.mark.gpu
def test_no_kind_of_sampling_waits_for_a_capture(folders: dict[str, Path]) -> None:
    llm = LLM(folders["llama"], "cuda", compute_dtype="fp16", max_batch_size=4, max_seq_len=64)
    graphs = llm.executor.runner.graphs
    assert graphs is not None
    llm.warm_up([1], kinds=["greedy"])
    assert {kind for _, kind in graphs._captured} == {KINDS["greedy"]}
    llm.warm_up()
    captured = {(bucket, kind) for bucket in (1, 2, 4) for kind in KINDS.values()}
    assert set(graphs._captured) == captured
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    assert llm.executor.runner.feed.counts.num_held == 0, "a capture takes no slot"
    before = llm.executor.runner.feed.counts.table
    assert not before.any(), "padding is counted nowhere"
    changes: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"repetition_penalty": 1.05},
        {"min_new_tokens": 2}, {"logprobs": 5}, {"temperature": 0.7, "frequency_penalty": 1.0, "logprobs": 0},
    ]  # fmt: skip
    for change in changes:
        with watch(llm) as steps:
            llm.generate([[5, 6], [7]], [params, params.replace(**change)])
        assert steps.ahead == len(steps.steps), change
    assert set(graphs._captured) == captured
    assert llm.executor.runner.feed.counts.table.data_ptr() == before.data_ptr(), "graphs hold its address"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([{}], "greedy"),
        ([{}, {"temperature": 1.0, "min_p": 0.1}], "unfiltered"),
        ([{"temperature": 1.0, "top_p": 0.5}, {}], "filtered"),
        ([{"temperature": 1.0, "top_p": 0.5}, {"slot": 3}], "penalized"),
        ([{"logprobs": True}, {"slot": 3}], "logprobs"),
    ],
)
def test_the_least_general_kind_that_does_all_rows(values: list[dict[str, Any]], kind: str) -> None:
    draws = [RowSampling(**one) for one in values]
    assert sampling_kind(draws) == KINDS[kind]
    flags, wanted = (SamplingTensors.from_rows(rows, "cpu") for rows in (KINDS[kind], draws))
    for name in ("any_rules", "any_logprobs", "any_top_p"):
        assert getattr(flags, name) >= getattr(wanted, name)
    assert flags.all_greedy <= wanted.all_greedy
