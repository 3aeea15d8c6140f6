"""The walk over layers of RPTQ computes what the modules compute.

Both sum the same numbers, but norms and attention sum floats in other orders: now and then a number goes to
its other neighbour.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.config.quant import QuantConfig
from ingot.layers import blocks_walk
from ingot.layers.blocks_walk import walks_in_blocks
from ingot.runtime import forward
from tests.tiny_models import random_ids, save_model, tiny_config

VARIANTS = {
    "llama": {},
    "llama-mha-bias": {"num_key_value_heads": 4, "attention_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
}
PROMPTS = [[5, 6, 7], list(range(30)), [90]]
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=4)
# of a size that the kernels read in whole tiles
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def engine(folder: Path, scheme: str, group: int = 32, dtype: str = "fp32", device: str = "cpu") -> Path:
    """Of the checkpoint in ``folder``, beside it."""
    samples = folder.with_name("ids.jsonl")
    samples.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return build(
        folder,
        folder.with_name("engine"),
        quant=QuantConfig(scheme, group),
        dtype=dtype,
        calib=samples,
        device=device,
        proof=False,
        tune=False,
    )


def count_walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each step that the walk computed."""
    steps: list[int] = []
    original = forward.blocks_hidden

    def counted(model, hidden, *rest):  # type: ignore[no-untyped-def]
        steps.append(hidden.shape[0])
        return original(model, hidden, *rest)

    monkeypatch.setattr(forward, "blocks_hidden", counted)
    return steps


@pytest.mark.parametrize("scheme", ["rptq-w8a8", "rptq-w4a4"])
@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_plain(name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config(name.partition("-")[0], **VARIANTS[name]), tmp_path / "c", seed=3)
    llm = LLM(engine(tmp_path / "c", scheme), device="cpu")
    llm.executor.runner.forward.fused = False
    plain = llm.generate(PROMPTS, PARAMS)
    steps = count_walks(monkeypatch)
    llm.executor.runner.forward.fused = True
    walked = llm.generate(PROMPTS, PARAMS)
    assert steps.count(3) >= 14
    assert sum(steps) >= 34 + 3 * 14
    for one, other in zip(plain, walked, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            near = torch.tensor([v for _, v in a.top]), torch.tensor([v for _, v in b.top])
            assert torch.allclose(*near, rtol=0, atol=0.02)


@pytest.mark.parametrize(("group", "passes"), [(32, 0), (128, 1)])
def test_attention_ends_in_numbers(
    group: int, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as of a pass after it, which is left only where 64 columns do not fill a block."""
    save_model(tiny_config("llama"), tmp_path / "c", seed=3)
    llm = LLM(engine(tmp_path / "c", "rptq-w8a8", group), device="cpu")
    llm.executor.runner.forward.fused = True
    calls: list[int] = []
    original = blocks_walk.in_blocks

    def counted(x, steps):  # type: ignore[no-untyped-def]
        calls.append(x.shape[0])
        return original(x, steps)

    monkeypatch.setattr(blocks_walk, "in_blocks", counted)
    steps = count_walks(monkeypatch)
    found = llm.generate(PROMPTS, PARAMS)
    assert len(calls) == passes * len(steps) * llm.engine.model.config.num_layers
    monkeypatch.setattr(blocks_walk, "takes_steps", lambda *_: False)
    for one, other in zip(found, llm.generate(PROMPTS, PARAMS), strict=True):
        assert one.token_ids == other.token_ids
        assert [a.top for a in one.logprobs] == [b.top for b in other.logprobs]


def test_other_shapes_run_module_by_module(tmp_path: Path) -> None:
    save_model(tiny_config("gpt2"), tmp_path / "c", seed=3)
    assert not walks_in_blocks(LLM(engine(tmp_path / "c", "rptq-w8a8"), device="cpu").engine.model)
    save_model(tiny_config("llama"), tmp_path / "d" / "c", seed=3)
    assert not walks_in_blocks(LLM(tmp_path / "d" / "c", device="cpu", quant="w8a8").engine.model)
