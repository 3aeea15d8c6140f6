"""Fused operations compute what the modules compute: activations in few bits.

Both sum the same quantized values, but norms and attention sum floats in other orders: now and then a value
goes to its other neighbour, which moves a logarithm of these tiny models by up to 0.01.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.kernels.rows.block_rows import BlockSteps
from ingot.kernels.tiles.int8_tiles import DECODE_ROWS
from ingot.layers.linear import linears
from ingot.layers.products import product_choice as ways
from ingot.layers.products import row_forms as forms
from ingot.layers.products.product_choice import Step
from ingot.quant.schemes.int8_both import Int8Both
from tests.parity.walk_ways import count_steps, expect_same
from tests.tiny_models import random_ids, save_model, tiny_config

pytestmark = pytest.mark.usefixtures("weights_as_stored")

VARIANTS = {
    "llama": {},
    "llama-mha-bias": {"num_key_value_heads": 4, "attention_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
}
OTHERS = {"gemma2": {}, "gemma3": {}}
PROMPTS = [[5, 6, 7], list(range(30)), [90]]
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=4)
# of a size that the kernels read in whole tiles
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def engine(
    folder: Path,
    scheme: str,
    group: int = 32,
    dtype: str = "fp32",
    device: str = "cpu",
    head: str = "none",
    **sizes: int,
) -> Path:
    """Of the checkpoint in ``folder``, beside it."""
    samples = folder.with_name("ids.jsonl")
    samples.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return build(
        folder,
        folder.with_name("engine"),
        quant=QuantConfig(scheme, group, head=head),
        dtype=dtype,
        calib=samples,
        device=device,
        proof=False,
        tune=False,
        **sizes,
    )


def llm_of(name: str, scheme: str, folder: Path) -> LLM:
    save_model(tiny_config(name.partition("-")[0], **(VARIANTS | OTHERS)[name]), folder / "c", seed=3)
    if scheme.startswith("rptq"):
        return LLM(engine(folder / "c", scheme), device="cpu")
    return LLM(folder / "c", device="cpu", quant=scheme)


def compare(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.executor.runner.forward.fused = False
    plain = llm.generate(PROMPTS, PARAMS)
    seen = count_steps(monkeypatch)
    llm.executor.runner.forward.fused = True
    expect_same(plain, llm.generate(PROMPTS, PARAMS))
    assert seen["decodes"].count(3) >= 14
    assert 34 <= sum(seen["others"]) < 3 * 14


@pytest.mark.stays("llama-w8a8", "llama-mha-bias-w4a8", "llama-tied-rptq-w8a8")
@pytest.mark.grid(1)
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "rptq-w8a8", "rptq-w4a4", "w8a8-fp8"])
@pytest.mark.parametrize("name", VARIANTS)
def test_fused_is_by_module(name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(llm_of(name, scheme, tmp_path), monkeypatch)


@pytest.mark.grid(1)
@pytest.mark.parametrize("scheme", ["w8a8", "rptq-w8a8", "rptq-w4a4"])
@pytest.mark.parametrize("name", OTHERS)
def test_outputs_that_are_normed(
    name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(llm_of(name, scheme, tmp_path), monkeypatch)


@pytest.mark.grid(1)
@pytest.mark.parametrize("scheme", ["w8a8", "rptq-w8a8"])
@pytest.mark.parametrize(("head", "limit"), [("none", DECODE_ROWS), ("w8a16", DECODE_ROWS), ("none", 69)])
def test_steps_of_more_rows_than_small_products_take(
    scheme: str, head: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 requests decode at once, their logits the matrix library's; beyond ``limit`` sums are not split."""
    save_model(tiny_config("llama"), tmp_path / "c", seed=3)
    runtime = RuntimeConfig(cache_tokens=8192, prefix_reuse=False)
    if scheme == "w8a8":
        quant = QuantConfig(scheme=scheme, head=head)
        llm = LLM(tmp_path / "c", device="cpu", quant=quant, runtime=runtime, max_batch_size=70)
    else:
        folder = engine(tmp_path / "c", scheme, head=head, max_batch_size=70)
        llm = LLM(folder, device="cpu", runtime=runtime)
    prompts = [[index % 90 + 1, index // 7 + 1] for index in range(70)]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=4)
    llm.executor.runner.forward.fused = False
    plain = llm.generate(prompts, params)
    seen = count_steps(monkeypatch)
    monkeypatch.setattr(ways, "DECODE_ROWS", limit)
    llm.executor.runner.forward.fused = True
    expect_same(plain, llm.generate(prompts, params))
    assert seen["decodes"].count(70) >= 1
    layers = llm.executor.runner.forward.operations(Step(decodes=True, rows=70)).layers
    assert {product.splits for layer in layers for product in (layer.output, layer.down)} == {limit >= 70}


def test_static_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of("llama", "w8a8", tmp_path)
    for index, linear in enumerate(linears(llm.engine.model).values()):
        if isinstance(linear.scheme, Int8Both):
            linear.scheme = Int8Both(static=True)
            scale = torch.tensor([(1 + index % 3) / 127.0])  # some cut
            linear.register_parameter("input_scale", torch.nn.Parameter(scale, requires_grad=False))
    compare(llm, monkeypatch)


def test_over_a_cache_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant="w8a8", runtime=RuntimeConfig(kv_dtype="int8"))
    assert llm.executor.runner.forward.caches[0].keys.dtype == torch.int8
    compare(llm, monkeypatch)


@pytest.mark.parametrize(("group", "passes"), [(32, 0), (128, 1)])
def test_attention_ends_in_blocks(
    group: int, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as of a pass after it, which is left only where 64 columns do not fill a block."""
    save_model(tiny_config("llama"), tmp_path / "c", seed=3)
    llm = LLM(engine(tmp_path / "c", "rptq-w8a8", group), device="cpu")
    llm.executor.runner.forward.fused = True
    calls: list[int] = []
    original = forms.in_blocks

    def counted(x, steps):  # type: ignore[no-untyped-def]
        calls.append(x.shape[0])
        return original(x, steps)

    monkeypatch.setattr(forms, "in_blocks", counted)
    seen = count_steps(monkeypatch)
    found = llm.generate(PROMPTS, PARAMS)
    steps = sum(len(counts) for counts in seen.values())
    assert steps >= 15
    assert len(calls) == passes * steps * llm.engine.model.config.num_layers
    monkeypatch.setattr(BlockSteps, "fill", lambda *_: False)
    for one, other in zip(found, llm.generate(PROMPTS, PARAMS), strict=True):
        assert one.token_ids == other.token_ids
        assert [a.top for a in one.logprobs] == [b.top for b in other.logprobs]
