"""Prompt steps replayed as CUDA graphs give what the eager steps give."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime import RuntimeConfig
from ingot.runtime.prompt_graphs import PromptGraphs, bucket_of
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
