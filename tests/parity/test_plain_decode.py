"""Decode steps of GPT-2 with bias and residual inside the products give what the modules give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime import RuntimeConfig
from ingot.layers.plain_decode import is_plain, plain_logits
from ingot.runtime import forward
from tests.tiny_models import random_ids, save_model, tiny_config

PROMPTS = [random_ids(length, seed=length) for length in (1, 40, 9)]


def test_plain_is_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("gpt2"), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu")
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=4)
    by_module = llm.generate(PROMPTS, params)
    rows: list[int] = []

    def counted(model: object, hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return plain_logits(model, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "plain_logits", counted)
    assert not llm.executor.runner.forward.plain
    llm.executor.runner.forward.plain = True
    plain = llm.generate(PROMPTS, params)
    assert rows.count(3) >= 14
    for one, other in zip(by_module, plain, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            pairs = zip(a.top, b.top, strict=True)
            assert all(x == y and abs(v - w) < 1e-4 for (x, v), (y, w) in pairs)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_gated_models_are_not_plain(kind: str, tmp_path: Path) -> None:
    save_model(tiny_config(kind), tmp_path, seed=3)
    assert not is_plain(LLM(tmp_path, device="cpu").engine.model)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("graphs", [True, False])
def test_plain_is_by_module_on_a_gpu(tmp_path: Path, dtype: str, graphs: bool) -> None:
    save_model(tiny_config("gpt2"), tmp_path, seed=3)
    runs = []
    for plain in (True, False):
        runtime = RuntimeConfig(cuda_graphs=graphs, fused_decode=plain)
        llm = LLM(tmp_path, device="cuda", compute_dtype=dtype, runtime=runtime)
        assert llm.executor.runner.forward.plain == plain
        runs.append(llm.generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)))
    tolerance = {"fp16": 0.02, "bf16": 0.15}[dtype]
    for one, other in zip(*runs, strict=True):
        first, second = one.logprobs[1], other.logprobs[1]
        if one.token_ids[:2] == other.token_ids[:2]:
            assert first.logprob == pytest.approx(second.logprob, abs=tolerance)
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=tolerance)
