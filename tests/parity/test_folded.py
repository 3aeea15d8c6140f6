"""Residual sums inside the products give what the modules give, layer by layer and end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime import RuntimeConfig
from ingot.layers.folded import folded_hidden, folds
from ingot.runtime import forward
from ingot.runtime.scheduler import ScheduledBatch, ScheduledRequest
from tests.e2e.watch import watch
from tests.tiny_models import random_ids, save_model, tiny_config

VARIANTS = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
}
PROMPTS = [random_ids(length, seed=length) for length in (1, 40, 70, 9)]


def llm_of(name: str, folder: Path, device: str = "cpu", **options: object) -> LLM:
    save_model(tiny_config(name.partition("-")[0], **VARIANTS[name]), folder, seed=3)
    runtime = RuntimeConfig(prefix_reuse=False, cuda_graphs=False)
    return LLM(folder, device=device, runtime=runtime, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", VARIANTS)
def test_folded_is_plain(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(name, tmp_path)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=4)
    assert not llm.executor.runner.forward.folded
    plain = llm.generate(PROMPTS, params)
    tokens: list[int] = []

    def counted(model: object, hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        tokens.append(hidden.shape[0])
        return folded_hidden(model, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "folded_hidden", counted)
    llm.executor.runner.forward.folded = folds(llm.engine.model)
    with watch(llm) as steps:
        folded = llm.generate(PROMPTS, params)
    assert tokens == [sum(share.count for share in step) for step in steps.steps]
    assert max(tokens) > 48
    for one, other in zip(plain, folded, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            pairs = zip(a.top, b.top, strict=True)
            assert all(x == y and abs(v - w) < 1e-4 for (x, v), (y, w) in pairs)


def test_each_layer_adds_the_same(tmp_path: Path) -> None:
    """The stream after one layer, two layers, and so on."""
    llm = llm_of("llama", tmp_path)
    model, runner = llm.engine.model, llm.executor.runner
    assert len(model.layers) > 1
    while len(model.layers):
        streams = []
        for folded in (False, True):
            llm.executor.add("r", PROMPTS[1], SamplingParams(max_new_tokens=1))
            runner.forward.folded = folded
            runner.forward.caches = runner.caches[: len(model.layers)]
            request = llm.executor.scheduler.waiting[0]
            llm.executor.blocks.grow(request, request.num_tokens)
            step = ScheduledBatch([ScheduledRequest(request, 0, request.num_tokens, samples=True)])
            streams.append(runner.run(step))
            llm.executor.abort("r")
        torch.testing.assert_close(*streams, rtol=1e-4, atol=1e-5)
        del model.layers[-1]


def test_biased_products_run_module_by_module(tmp_path: Path) -> None:
    save_model(tiny_config("gpt2"), tmp_path, seed=3)
    assert not folds(LLM(tmp_path, device="cpu").engine.model)


def test_a_tap_sees_the_modules(tmp_path: Path) -> None:
    llm = llm_of("llama", tmp_path)
    llm.executor.runner.forward.folded = True
    with llm.tap("layers.*") as seen:
        llm.generate(PROMPTS[1], SamplingParams(max_new_tokens=1))
    assert seen["layers.0"].shape[0] == len(PROMPTS[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_folded_is_plain_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    llm = llm_of("llama", tmp_path, "cuda", compute_dtype=dtype)
    assert llm.executor.runner.forward.folded
    logits = []
    for folded in (True, False):
        llm.executor.runner.forward.folded = folded
        logits.append(llm.logits(PROMPTS[2]))
    tolerance = {"fp16": 0.02, "bf16": 0.15}[dtype]
    torch.testing.assert_close(*logits, rtol=tolerance, atol=tolerance)
