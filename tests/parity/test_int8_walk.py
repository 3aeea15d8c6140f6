"""The walks over layers in 8 bits compute what the modules compute.

Both sum the same numbers, but norms and attention sum floats in other orders: now and then a number of 8 bits
goes to its other neighbour, which moves a logarithm of these tiny models by up to 0.01.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.quant import QuantConfig
from ingot.config.runtime import RuntimeConfig
from ingot.layers.int8_walk import walks_int8
from ingot.layers.linear import linears
from ingot.quant.int8_both import Int8Both
from tests.parity.walk_ways import count_walks, expect_same
from tests.tiny_models import save_model, tiny_config

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


def compare(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.executor.runner.forward.fused = False
    plain = llm.generate(PROMPTS, PARAMS)
    seen = count_walks(monkeypatch, "int8")
    llm.executor.runner.forward.fused = True
    walked = llm.generate(PROMPTS, PARAMS)
    assert seen["int8_logits"].count(3) >= 14
    assert sum(seen["int8_hidden"]) >= 34
    expect_same(plain, walked)


@pytest.mark.parametrize("name", VARIANTS)
def test_walks_are_plain(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config(name.partition("-")[0], **VARIANTS[name]), tmp_path, seed=3)
    compare(LLM(tmp_path, device="cpu", quant="w8a8"), monkeypatch)


@pytest.mark.parametrize("head", ["none", "w8a16"])
def test_steps_of_more_rows_than_small_products_take(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 requests decode at once; their logits are the matrix library's."""
    save_model(tiny_config("llama"), tmp_path, seed=3)
    quant = QuantConfig(scheme="w8a8", head=head)
    runtime = RuntimeConfig(cache_tokens=8192, prefix_reuse=False)
    llm = LLM(tmp_path, device="cpu", quant=quant, runtime=runtime, max_batch_size=70)
    prompts = [[index % 90 + 1, index // 7 + 1] for index in range(70)]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=4)
    llm.executor.runner.forward.fused = False
    plain = llm.generate(prompts, params)
    seen = count_walks(monkeypatch, "int8")
    llm.executor.runner.forward.fused = True
    expect_same(plain, llm.generate(prompts, params))
    assert seen["int8_logits"].count(70) >= 1


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_walks_of_4_bits_inside_8(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config(name.partition("-")[0], **VARIANTS[name]), tmp_path, seed=1)
    compare(LLM(tmp_path, "cpu", quant="w4a8"), monkeypatch)


def test_static_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant="w8a8")
    for index, linear in enumerate(linears(llm.engine.model).values()):
        if isinstance(linear.scheme, Int8Both):
            linear.scheme = Int8Both(static=True)
            scale = torch.tensor([(1 + index % 3) / 127.0])  # some cut
            linear.register_parameter("input_scale", torch.nn.Parameter(scale, requires_grad=False))
    compare(llm, monkeypatch)


def test_other_schemes_and_shapes_run_as_before(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path / "llama", seed=3)
    assert not walks_int8(LLM(tmp_path / "llama", device="cpu", quant="w8a16").engine.model)
    assert not walks_int8(LLM(tmp_path / "llama", device="cpu").engine.model)
    save_model(tiny_config("gpt2"), tmp_path / "gpt2", seed=3)
    assert not walks_int8(LLM(tmp_path / "gpt2", device="cpu", quant="w8a8").engine.model)


def test_a_tap_sees_the_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant="w8a8")
    seen = count_walks(monkeypatch, "int8")
    llm.executor.runner.forward.fused = True
    with llm.tap("layers.*") as tapped:
        llm.generate([1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert tapped["layers.0"].shape[0] >= 7
    assert seen == {"int8_logits": [], "int8_hidden": []}


def test_over_a_cache_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant="w8a8", runtime=RuntimeConfig(kv_dtype="int8"))
    assert llm.executor.runner.forward.caches[0].keys.dtype == torch.int8
    compare(llm, monkeypatch)
