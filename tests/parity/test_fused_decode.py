"""The folded decode kernels compute what the modules compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime import RuntimeConfig
from ingot.kernels import packed_matmul
from ingot.kernels.operand_rows import OperandRows
from ingot.kernels.stored_weight import StoredWeight
from ingot.layers import fused_decode
from ingot.layers.fused_decode import ALL, NARROW_WAYS, NONE, fuses, small_products, ways_of
from ingot.runtime import forward
from tests.tiny_models import save_model, tiny_config

VARIANTS = {
    "llama": {},
    "llama-mha-bias": {"num_key_value_heads": 4, "attention_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
}


def steps_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each step that the folded kernels computed."""
    seen: list[int] = []
    original = forward.fused_logits

    def counted(model: object, hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return original(model, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "fused_logits", counted)
    llm.executor.runner.forward.fused = True
    return seen


def compare(llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=4)
    plain = llm.generate(prompts, params)
    seen = steps_run(llm, monkeypatch)
    folded = llm.generate(prompts, params)
    assert seen.count(len(prompts)) >= 20
    for one, other in zip(plain, folded, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert [t for t, _ in a.top] == [t for t, _ in b.top]
            assert torch.allclose(
                torch.tensor([v for _, v in a.top]), torch.tensor([v for _, v in b.top]), atol=1e-4
            )


@pytest.mark.parametrize("name", VARIANTS)
def test_folded_is_plain(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config(name.partition("-")[0], **VARIANTS[name]), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu")
    assert not llm.executor.runner.forward.fused
    compare(llm, [[5, 6, 7], list(range(30)), [90]], monkeypatch)


HYBRIDS = [frozenset(), frozenset({"o", "down"}), frozenset({"qkv", "gate_up"}), ALL - {"head", "down"}]


@pytest.mark.parametrize("small", HYBRIDS, ids=lambda small: "+".join(sorted(small)) or "none")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_hybrids_are_plain(
    name: str, small: frozenset[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix library's products beside the small kernels', whatever is left to which."""
    save_model(tiny_config(name), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu")
    assert fuses(llm.engine.model, small)
    llm.executor.runner.forward.ways = ((1, ALL), (2, small), (4, small))
    compare(llm, [[5, 6, 7], list(range(30)), [90]], monkeypatch)


def test_the_table_of_rows() -> None:
    ways = ((1, ALL), (8, ALL - {"head"}), (256, frozenset()))
    found = [small_products(rows, ways) for rows in (1, 2, 8, 9, 256, 257)]
    assert found == [ALL, ALL - {"head"}, ALL - {"head"}, frozenset(), frozenset(), None]
    assert [small_products(rows) for rows in (1, 32, 33, 65)] == [ALL, ALL, ALL - {"qkv"}, frozenset()]


def test_a_bias_keeps_the_products_that_add_it(tmp_path: Path) -> None:
    save_model(tiny_config("llama", attention_bias=True), tmp_path, seed=3)
    model = LLM(tmp_path, device="cpu").engine.model
    assert fuses(model, frozenset({"o", "down"}))
    assert not fuses(model, frozenset({"qkv"}))


def packed_takes_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a CPU walks as a GPU does, whose dtypes have 16 bits."""
    every = (*packed_matmul.DTYPES, torch.float32)
    monkeypatch.setattr(packed_matmul, "DTYPES", every)
    monkeypatch.setattr(fused_decode, "PACKED_DTYPES", every)


@pytest.mark.parametrize("quant", ["w8a16", "w4a16"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_narrow_weights_of_many_rows_are_plain(
    name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk of more rows than the small kernels take."""
    save_model(tiny_config(name), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant=quant)
    assert not fuses(llm.engine.model, NONE)
    packed_takes_fp32(monkeypatch)
    assert fuses(llm.engine.model, NONE)
    llm.executor.runner.forward.ways = ((1, ALL), (4, NONE))
    compare(llm, [[5, 6, 7], list(range(30)), [90]], monkeypatch)


@pytest.mark.parametrize("ordered", [set(), {"qkv"}, {"o", "down"}, {"qkv", "o", "gate_up", "down"}])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_order_of_columns_is_plain(
    ordered: set[str], parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products take their input in the operand's order or not, as their tiles want; QKV in parts or whole."""
    save_model(tiny_config("qwen2", hidden_size=128, head_dim=32, intermediate_size=192), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant="w8a16")
    layer = llm.engine.model.layers[0]
    products = {"qkv": layer.self_attn.qkv_proj, "o": layer.self_attn.o_proj}
    products |= {"gate_up": layer.mlp.gate_up_proj, "down": layer.mlp.down_proj}
    shapes = {(p.out_features, p.in_features): n for n, p in products.items()}
    assert len(shapes) == len(products)
    packed_takes_fp32(monkeypatch)
    seen: dict[str, set[type]] = {name: set() for name in products}

    def takes(rows: int, weight: StoredWeight, *rest: object) -> bool:
        return shapes[weight.out_features, weight.in_features] in ordered

    def watched(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(x: object, weight: StoredWeight, *rest: object) -> torch.Tensor:
            seen[shapes[weight.out_features, weight.in_features]].add(type(x))
            return original(x, weight, *rest)

        return call

    monkeypatch.setattr(fused_decode, "takes_operand", takes)
    monkeypatch.setattr(fused_decode, "packed_splits", lambda *given: parts)
    for name in ("packed_matmul", "packed_matmul_parts"):
        monkeypatch.setattr(fused_decode, name, watched(getattr(fused_decode, name)))
    llm.executor.runner.forward.ways = ((1, ALL), (4, NONE))
    compare(llm, [[5, 6, 7], list(range(30)), [90]], monkeypatch)
    kinds = {name: {OperandRows if name in ordered else torch.Tensor} for name in products}
    assert seen == kinds


NARROW_HYBRIDS = [frozenset({"qkv", "head"}), ALL - {"gate_up"}, ALL - {"qkv"}, frozenset({"gate_up"})]


@pytest.mark.parametrize("small", NARROW_HYBRIDS, ids=lambda small: "+".join(sorted(small)))
def test_narrow_hybrids_are_plain(
    small: frozenset[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product by packed_matmul beside the small kernels', and no other than those."""
    save_model(tiny_config("qwen2"), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant="w4a16")
    packed_takes_fp32(monkeypatch)
    seen: set[int] = set()

    def counted(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, weight: StoredWeight, *rest: object) -> torch.Tensor:
            seen.add(weight.out_features * weight.in_features)
            return original(x, weight, *rest)

        return call

    for name in ("packed_matmul", "packed_matmul_parts"):
        monkeypatch.setattr(fused_decode, name, counted(getattr(fused_decode, name)))
    llm.executor.runner.forward.ways = ((1, ALL), (4, small))
    compare(llm, [[5, 6, 7], list(range(30)), [90]], monkeypatch)
    layer = llm.engine.model.layers[0]
    products = {"qkv": layer.self_attn.qkv_proj, "o": layer.self_attn.o_proj}
    products |= {"gate_up": layer.mlp.gate_up_proj, "down": layer.mlp.down_proj}
    left = {n: p.out_features * p.in_features for n, p in products.items() if n not in small}
    assert seen == set(left.values())


def test_the_table_of_rows_of_narrow_weights() -> None:
    head = frozenset({"head"})
    found = [small_products(rows, NARROW_WAYS) for rows in (1, 8, 9, 64, 65, 256, 257)]
    assert found == [ALL, ALL, head, head, NONE, NONE, None]


@pytest.mark.parametrize("quant", ["none", "w8a16", "w4a16"])
def test_fewest_bits_choose_the_ways(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    model = LLM(tmp_path, device="cpu", quant=quant).engine.model
    if quant == "none":
        assert ways_of(model) == tuple(fused_decode.WAYS)
        return
    assert {small for _, small in ways_of(model)} == {ALL}  # fp32 is not packed_matmul's
    assert small_products(64, ways_of(model)) == ALL
    assert small_products(65, ways_of(model)) is None
    packed_takes_fp32(monkeypatch)
    assert ways_of(model) == tuple(NARROW_WAYS)


def test_folded_qwen_v1_beyond_its_length(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(golden / "qwen_v1_1_safetensors" / "hf", device="cpu")
    compare(llm, [list(range(3, 103)), list(range(60)), [1, 2, 3]], monkeypatch)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_other_shapes_run_module_by_module(kind: str, tmp_path: Path) -> None:
    save_model(tiny_config(kind), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu")
    assert not fuses(llm.engine.model)


def test_a_tap_sees_the_modules(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(golden / "llama_aidreams260K" / "hf", device="cpu")
    seen = steps_run(llm, monkeypatch)
    with llm.tap("layers.*") as tapped:
        output = llm.generate([1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True))[0]
    assert not seen
    assert tapped["layers.0"].shape[0] == 3 + len(output.token_ids) - 1
    assert (
        llm.generate([1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True))[0].token_ids
        == output.token_ids
    )
    assert seen


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("small", [ALL, *HYBRIDS], ids=lambda small: "+".join(sorted(small)) or "none")
def test_folded_is_plain_on_a_gpu(
    golden: Path, dtype: str, graphs: bool, small: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With early launches around the products that are left to the matrix library."""
    folder = golden / "llama_aidreams260K" / "hf"
    monkeypatch.setattr(fused_decode, "WAYS", ((8, small),))
    runs = []
    for fused in (True, False):
        runtime = RuntimeConfig(cuda_graphs=graphs, fused_decode=fused)
        llm = LLM(folder, device="cuda", compute_dtype=dtype, runtime=runtime)
        assert llm.executor.runner.forward.fused == fused
        params = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=0)
        runs.append(llm.generate([[1], [1, 400], [1, 300, 301]], params))
    tolerance = {"fp16": 0.02, "bf16": 0.15}[dtype]
    for one, other in zip(*runs, strict=True):
        same = [a == b for a, b in zip(one.token_ids, other.token_ids, strict=True)]
        agreed = same.index(False) if False in same else len(same)
        assert agreed >= 3
        for a, b in zip(one.logprobs[:agreed], other.logprobs[:agreed], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
