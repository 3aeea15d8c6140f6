"""Fused operations compute what the modules compute: weights as they are and in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.kernels.product.few_rows import stream_product
from ingot.kernels.product.packed import packed_matmul
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.kernels.weight.stored_weight import StoredWeight
from ingot.layers.products import layer_products as products
from ingot.layers.products import product_choice as ways
from ingot.layers.products.product_choice import ALL, Step
from ingot.layers.products.row_forms import RawForm
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest, layout_of
from tests.parity.walk_ways import count_steps, expect_same
from tests.tiny_models import random_ids, save_model, tiny_config

pytestmark = pytest.mark.usefixtures("weights_as_stored")

VARIANTS = {
    "llama": {},
    "llama-mha-bias": {"num_key_value_heads": 4, "attention_bias": True},
    "llama-mlp-bias": {"mlp_bias": True},
    "llama-wide-heads": {"head_dim": 32},
    "qwen3-wide-heads": {"head_dim": 32},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3": {},
    "gpt2": {},
    "opt": {},
}
PROMPTS = [[5, 6, 7], list(range(30)), [90]]
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=4)
NEAR = 1e-4  # nats, in fp32


def llm_of(name: str, folder: Path, device: str = "cpu", **options: object) -> LLM:
    save_model(tiny_config(name.partition("-")[0], **VARIANTS[name]), folder, seed=3)
    runtime = RuntimeConfig(prefix_reuse=False, cuda_graphs=False)
    return LLM(folder, device=device, **{"runtime": runtime} | options)  # type: ignore[arg-type]


def compare(llm: LLM, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]] = PROMPTS) -> None:
    forward = llm.executor.runner.forward
    assert not forward.fused  # a CPU
    plain = llm.generate(prompts, PARAMS)
    seen = count_steps(monkeypatch)
    forward.fused = True
    expect_same(plain, llm.generate(prompts, PARAMS), NEAR)
    assert seen["decodes"].count(len(prompts)) >= 14
    assert sum(seen["others"]) >= sum(len(prompt) for prompt in prompts) - len(prompts)


@pytest.mark.grid(1)
@pytest.mark.parametrize("quant", ["none", "w4a16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_fused_is_by_module(name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(llm_of(name, tmp_path, quant=quant), monkeypatch)


@pytest.mark.stays("qwen3-none", "gemma2-none", "gemma3-none")
@pytest.mark.parametrize("quant", ["none", "w8a16"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3"])
def test_one_token_alone(name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and sums fold into the products of dense weights, unless outputs are normed, too."""
    compare(llm_of(name, tmp_path, quant=quant), monkeypatch, [[5, 6, 7]])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_over_a_cache_in_8_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(llm_of(name, tmp_path, runtime=RuntimeConfig(kv_dtype="int8")), monkeypatch, [[5, 6, 7]])


def test_qwen_v1_beyond_its_length(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RuntimeConfig(prefix_reuse=False)
    llm = LLM(golden / "qwen_v1_1_safetensors" / "hf", device="cpu", runtime=runtime)
    compare(llm, monkeypatch, [list(range(3, 103)), list(range(60)), [1, 2, 3]])


def test_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, beside decodes."""
    lengths = (1, 40, 70, 9)
    compare(llm_of("llama", tmp_path), monkeypatch, [random_ids(length, seed=length) for length in lengths])


@pytest.mark.grid(1)
@pytest.mark.parametrize("small", [set(), {"o", "down"}, {"qkv", "gate_up"}, ALL - {"head", "down"}])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_whatever_the_small_kernels_compute(
    name: str, small: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix library's products beside the small kernels'."""
    llm = llm_of(name, tmp_path)
    llm.executor.runner.forward.chooser.dense = ((1, ALL), (4, frozenset(small)))
    compare(llm, monkeypatch)


def test_schemes_of_every_kind_in_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product takes its own form beside the others'."""
    config = tiny_config("llama", num_hidden_layers=4)
    save_model(config, tmp_path, seed=3)
    mixed = {"layers.0.self*": "w8a8", "layers.1.mlp*": "w8a8", "layers.2.*": "w4a16", "layers.3.*": "none"}
    llm = LLM(tmp_path, device="cpu", quant=QuantConfig("w8a16", layers=mixed))
    forward = llm.executor.runner.forward
    plain = llm.generate(PROMPTS, PARAMS)
    seen = count_steps(monkeypatch)
    forward.fused = True
    expect_same(plain, llm.generate(PROMPTS, PARAMS))
    assert seen["decodes"].count(3) >= 14


def packed_takes_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a CPU chooses as a GPU does, whose dtypes have 16 bits."""
    every = (*packed_matmul.DTYPES, torch.float32)
    monkeypatch.setattr(packed_matmul, "DTYPES", every)
    monkeypatch.setattr(ways, "PACKED_DTYPES", every)


def cpu_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a CPU chooses as a Hopper GPU does."""
    monkeypatch.setattr(ways, "is_hopper", lambda device: True)
    monkeypatch.setattr(stream_product, "DTYPES", (torch.float32,))
    monkeypatch.setattr(stream_product, "NORMED_COLUMNS", 32)


@pytest.mark.grid(1)
@pytest.mark.parametrize("quant", ["w8a16", "w4a16"])
@pytest.mark.parametrize(
    "name", ["llama-wide-heads", "llama-mlp-bias", "qwen2", "qwen3-wide-heads", "gemma2", "gemma3", "gpt2"]
)
def test_streaming_products(name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one request; of several there are none."""
    cpu_streams(monkeypatch)
    llm = llm_of(name, tmp_path, quant=quant)
    forward = llm.executor.runner.forward
    one, two = (forward.operations(Step(decodes=True, rows=rows)).layers[0] for rows in (1, 2))
    assert {type(p) for p in (one.qkv, one.output, one.up, one.down)} == {products.StreamProduct}
    assert not isinstance(two.down, products.StreamProduct)
    head = forward.chooser.product("head", one.down.linear, Step(decodes=True, rows=1))
    assert not isinstance(head, products.StreamProduct)  # whose rows a probe may choose
    normed = name[:4] in ("llam", "qwen")
    assert isinstance(one.up.form, RawForm) == isinstance(one.qkv.form, RawForm) == normed
    compare(llm, monkeypatch, [[5, 6, 7]])
    assert "down: streaming kernels" in forward.kernels()["decode, 1 request"]


def test_streaming_products_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a norm is no product's: another layer's product adds up its parts in it."""
    cpu_streams(monkeypatch)
    save_model(tiny_config("llama"), tmp_path, seed=3)
    quant = QuantConfig("w4a16", layers={"*.down_proj": "none"})
    runtime = RuntimeConfig(prefix_reuse=False, cuda_graphs=False)
    llm = LLM(tmp_path, device="cpu", quant=quant, runtime=runtime)
    layer = llm.executor.runner.forward.operations(Step(decodes=True, rows=1)).layers[0]
    assert isinstance(layer.qkv, products.StreamProduct)
    assert not isinstance(layer.qkv.form, RawForm)
    compare(llm, monkeypatch, [[5, 6, 7]])


@pytest.mark.grid(1)
@pytest.mark.parametrize("quant", ["w8a16", "w4a16"])
@pytest.mark.parametrize(
    "name", ["llama", "llama-mlp-bias", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "opt"]
)
def test_packed_products(name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in fewer bits with more rows than the small kernels take."""
    llm = llm_of(name, tmp_path, quant=quant)
    packed_takes_fp32(monkeypatch)
    llm.executor.runner.forward.chooser.narrow = ((1, ALL),)
    compare(llm, monkeypatch)


@pytest.mark.grid(1)
@pytest.mark.parametrize("ordered", [set(), {"qkv"}, {"o", "down"}, {"qkv", "o", "gate_up", "down"}])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_order_of_columns(
    ordered: set[str], parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products take their input in the operand's order or not, as their tiles want; QKV in parts or whole."""
    save_model(tiny_config("qwen2", hidden_size=128, head_dim=32, intermediate_size=192), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant="w8a16")
    layer = llm.engine.model.layers[0]
    linears = {"qkv": layer.self_attn.qkv_proj, "o": layer.self_attn.o_proj}
    linears |= {"gate_up": layer.mlp.gate_up_proj, "down": layer.mlp.down_proj}
    shapes = {(p.out_features, p.in_features): n for n, p in linears.items()}
    assert len(shapes) == len(linears)
    packed_takes_fp32(monkeypatch)
    seen: dict[str, set[type]] = {name: set() for name in linears}

    def takes(rows: int, weight: StoredWeight, *rest: object) -> bool:
        return shapes[weight.out_features, weight.in_features] in ordered

    def watched(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(x: object, weight: StoredWeight, *rest: object) -> torch.Tensor:
            seen[shapes[weight.out_features, weight.in_features]].add(type(x))
            return original(x, weight, *rest)

        return call

    monkeypatch.setattr(ways, "takes_operand", takes)
    monkeypatch.setattr(products, "packed_splits", lambda *given: parts)
    for name in ("packed_matmul", "packed_matmul_parts"):
        monkeypatch.setattr(products, name, watched(getattr(products, name)))
    llm.executor.runner.forward.chooser.narrow = ((1, ALL),)
    compare(llm, monkeypatch)
    assert seen == {name: {OperandRows if name in ordered else torch.Tensor} for name in linears}


def test_each_layer_adds_the_same(tmp_path: Path) -> None:
    """The hidden states after one layer, two layers, and so on."""
    prompt = random_ids(40, seed=40)
    llm = llm_of("llama", tmp_path)
    model, runner = llm.engine.model, llm.executor.runner
    assert len(model.layers) > 1
    while len(model.layers):
        streams = []
        for fused in (False, True):
            llm.executor.add("r", prompt, SamplingParams(max_new_tokens=1))
            runner.forward = type(runner.forward)(model, runner.caches[: len(model.layers)], fused=fused)
            (request,) = llm.executor.scheduler.waiting
            llm.executor.blocks.grow(request, request.num_tokens)
            items = [ScheduledRequest(request, 0, request.num_tokens, samples=True)]
            step = ScheduledBatch(items, layout=layout_of(items, runner.block_size))
            streams.append(runner.run(step))
            llm.executor.abort("r")
        torch.testing.assert_close(*streams, rtol=1e-4, atol=1e-5)
        del model.layers[-1]


@pytest.mark.parametrize("quant", ["none", "w8a8"])
def test_a_tap_sees_the_modules(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of("llama", tmp_path, quant=quant)
    llm.executor.runner.forward.fused = True
    seen = count_steps(monkeypatch)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    with llm.tap("layers.*") as tapped:
        output = llm.generate([1, 2, 3], params)[0]
    assert seen == {"decodes": [], "others": []}
    assert tapped["layers.0"].shape[0] == 3 + len(output.token_ids) - 1
    assert llm.generate([1, 2, 3], params)[0].token_ids == output.token_ids
    assert len(seen["decodes"]) == 4


HYBRIDS = [ALL, frozenset(), frozenset({"o", "down"}), frozenset({"qkv", "gate_up"}), ALL - {"head", "down"}]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("small", HYBRIDS, ids=lambda small: "+".join(sorted(small)) or "none")
def test_fused_is_by_module_on_a_gpu(
    golden: Path, dtype: str, graphs: bool, small: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With early launches around the products that are left to the matrix library."""
    monkeypatch.setattr(ways, "DENSE_ROWS", ((8, small),))
    expect_near_on_a_gpu(golden / "llama_aidreams260K" / "hf", dtype, graphs, same=3)


OTHER_SHAPES = ["qwen3", "gpt2", "opt", "llama-mlp-bias", "gemma2", "gemma3"]
ROUNDED_APART = {
    "qwen3",
    "gpt2",
    "opt",
    "llama-mlp-bias",
}  # in w8a8 and fp16: test_activations_in_8_bits_on_a_gpu


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("name", "quant", "dtype"),
    [
        (name, quant, dtype)
        for name in OTHER_SHAPES
        for quant in ("none", "w8a16", "w4a16", "w8a8")
        for dtype in ("fp16", "bf16")
        if (quant, dtype) != ("w8a8", "fp16") or name not in ROUNDED_APART
    ],
)
def test_other_shapes_on_a_gpu(name: str, quant: str, dtype: str, graphs: bool, tmp_path: Path) -> None:
    save_model(tiny_config(name.partition("-")[0], **VARIANTS[name]), tmp_path, seed=3)
    expect_near_on_a_gpu(tmp_path, dtype, graphs, quant=quant)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["llama", *OTHER_SHAPES])
def test_fp32_on_a_gpu(name: str, graphs: bool, tmp_path: Path) -> None:
    """One request after another: their steps have one row."""
    save_model(tiny_config(name.partition("-")[0], **VARIANTS.get(name, {})), tmp_path, seed=3)
    expect_near_on_a_gpu(tmp_path, "fp32", graphs, same=12, max_batch_size=1)


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["w8a8", "w8a8-fp8"])
@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_activations_in_8_bits_on_a_gpu(name: str, quant: str, tmp_path: Path) -> None:
    """Fused, a norm rounds to 8 bits from fp32; by module, from fp16: values near a tie fall either way.

    So in fp16 both are equally far from what the modules give in fp32.
    """
    save_model(tiny_config(name.partition("-")[0], **VARIANTS[name]), tmp_path, seed=3)
    prompts = [random_ids(1 + seed % 24, seed=seed) for seed in range(96)]

    def run(dtype: str, fused: bool) -> torch.Tensor:
        """Logarithms of all tokens at every place of the prompts."""
        runtime = RuntimeConfig(cuda_graphs=False, fused_decode=fused, prefix_reuse=False)
        llm = LLM(tmp_path, device="cuda", compute_dtype=dtype, runtime=runtime, quant=quant)
        assert llm.executor.runner.forward.fused == fused
        return torch.cat([llm.logits(prompt) for prompt in prompts]).double().log_softmax(-1)

    exact = run("fp32", fused=False)
    fused, modules = (float((run("fp16", way) - exact).square().mean().sqrt()) for way in (True, False))
    assert 0 < fused <= 1.1 * modules


def expect_near_on_a_gpu(folder: Path, dtype: str, graphs: bool, same: int = 0, **options: Any) -> None:
    """Raise unless fused steps and the modules give the ``same`` number of equal tokens at least, and near
    logarithms as far as their tokens agree and one further: there both took what was likeliest.
    """
    runs = []
    for fused in (True, False):
        runtime = RuntimeConfig(cuda_graphs=graphs, fused_decode=fused)
        llm = LLM(folder, device="cuda", compute_dtype=dtype, runtime=runtime, **options)
        assert llm.executor.runner.forward.fused == fused
        params = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=0)
        runs.append(llm.generate([[1], [1, 40], [1, 30, 31]], params))
    tolerance = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.15}[dtype]
    for one, other in zip(*runs, strict=True):
        equal = [a == b for a, b in zip(one.token_ids, other.token_ids, strict=True)]
        agreed = equal.index(False) if False in equal else len(equal)
        assert agreed >= same
        for a, b in zip(one.logprobs[: agreed + 1], other.logprobs[: agreed + 1], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
