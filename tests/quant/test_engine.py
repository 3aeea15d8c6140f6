"""Engines in fewer bits: built, loaded, run, proven, told of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.bench.load import Ask
from ingot.bench.opening import open_side
from ingot.bench.side import SideSpec
from ingot.config.model import DecoderConfig, RopeConfig
from ingot.config.quant import QuantConfig
from ingot.config.runtime import RuntimeConfig
from ingot.engine.compare import compare_engines
from ingot.engine.ledger import ledger
from ingot.engine.loader import setting_of
from ingot.engine.manifest import Manifest
from ingot.engine.memory_sizes import weight_bytes
from ingot.errors import CheckpointError, ConfigError
from ingot.evaluate.opening import open_side as open_eval_side
from ingot.evaluate.side import SideSpec as EvalSpec
from ingot.evaluate.side import other_spec
from ingot.kernels.weight.stored_weight import StoredWeight, dequantized
from ingot.layers.linear import linears
from ingot.llm.repro import capture_layer, replay
from ingot.llm.verify import verify
from ingot.quant import weight_only
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.tiny_models import random_ids, save_model, tiny_config

KINDS = ("llama", "mistral", "qwen", "qwen2", "qwen3", "gpt2", "tied")
MIXED = QuantConfig(
    "w4a16", 32, head="w8a16", layers={"layers.0.mlp.*": "w8a16", "*.o_proj": "none", "layers.1.*": "w8a16"}
)
CONFIGS = {
    "w8a16": QuantConfig("w8a16"),
    "w4a16": QuantConfig("w4a16"),
    "w4a16, 32, head": QuantConfig("w4a16", 32, symmetric=True, head="w8a16"),
    "mixed": MIXED,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of every kind."""
    root = tmp_path_factory.mktemp("checkpoints")
    write_tiny(root / "qwen")
    for kind in KINDS:
        if kind != "qwen":
            tied: dict[str, Any] = {"tie_word_embeddings": True} if kind == "tied" else {}
            save_model(tiny_config("llama" if kind == "tied" else kind, **tied), root / kind, seed=3)
    return {kind: root / kind for kind in KINDS}


def dense_twin(checkpoint: Path, quantized: LLM) -> LLM:
    """A dense model whose weights are the quantized one's, dequantized."""
    llm = LLM(checkpoint, "cpu")
    model = llm.engine.model
    if model.tied and not quantized.engine.model.tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    own = linears(quantized.engine.model)
    for name, linear in linears(model).items():
        assert isinstance(linear.weight, torch.Tensor)
        linear.weight.copy_(own[name].dequantized(linear.weight.dtype))
    return llm


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_with_what_its_numbers_mean(
    checkpoints: dict[str, Path], kind: str, name: str, tmp_path: Path
) -> None:
    folder = build(checkpoints[kind], tmp_path / "engine", quant=CONFIGS[name], device="cpu", proof=False)
    llm = LLM(folder, "cpu")
    assert llm.engine.manifest.quant == CONFIGS[name]
    twin = dense_twin(checkpoints[kind], llm)
    prompt = random_ids(30, seed=5)
    torch.testing.assert_close(llm.logits(prompt), twin.logits(prompt), rtol=1e-4, atol=1e-4)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    prompts = [prompt, prompt[:3]]
    found = [output.token_ids for output in llm.generate(prompts, params)]
    assert found == [output.token_ids for output in twin.generate(prompts, params)]
    in_memory = LLM(checkpoints[kind], "cpu", quant=CONFIGS[name])
    assert torch.equal(in_memory.logits(prompt), llm.logits(prompt))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "tied"])
@pytest.mark.parametrize("name", CONFIGS)
def test_small_products_give_what_the_modules_give(
    checkpoints: dict[str, Path], kind: str, name: str
) -> None:
    """Decode steps of one row and of several, by the small kernels' twins."""
    llm = LLM(checkpoints[kind], "cpu", quant=CONFIGS[name])
    forward = llm.executor.runner.forward
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=0)
    for prompts in ([random_ids(9)], [random_ids(n, seed=n) for n in (3, 17, 1)]):
        by_module = llm.generate(prompts, params)
        forward.fused = True
        assert next(iter(forward.kernels().values())) == "small kernels"  # of few rows
        small = llm.generate(prompts, params)
        forward.fused = False
        for one, other in zip(by_module, small, strict=True):
            assert one.token_ids == other.token_ids
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_batch_invariance(checkpoints: dict[str, Path], kind: str) -> None:
    llm = LLM(checkpoints[kind], "cpu", quant=MIXED, runtime=RuntimeConfig(batch_invariant=True))
    assert not llm.executor.runner.forward.fused
    prompts = [random_ids(n, seed=n) for n in (3, 17, 1)]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=0)
    together = llm.generate(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, params)[0]
        assert [p.logprob for p in alone.logprobs] == [p.logprob for p in output.logprobs]


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["w8a16", "mixed"])
def test_an_engine_as_built_is_proven(
    checkpoints: dict[str, Path], kind: str, name: str, tmp_path: Path
) -> None:
    folder = build(checkpoints[kind], tmp_path / "engine", quant=CONFIGS[name], dtype="bf16", device="cpu")
    found = verify(folder, "cpu", note=False)
    assert found.verdict == "proven", found.failures


def test_a_wrong_product_is_named(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(checkpoints["llama"], tmp_path / "engine", quant="w4a16", device="cpu")

    def off_by_one(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
        zeros = None if weight.zeros is None else weight.zeros + 1
        return dequantized(dataclasses.replace(weight, zeros=zeros), dtype)

    monkeypatch.setattr(weight_only, "dequantized", off_by_one)
    found = verify(folder, "cpu", note=False)
    assert (found.verdict, found.first_bad_module) == ("failed", "layers.0.self_attn")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "tied"])
@pytest.mark.parametrize("name", [*CONFIGS, "w8a8"])
def test_the_ledger_is_right_to_the_byte(checkpoints: dict[str, Path], kind: str, name: str) -> None:
    llm = LLM(checkpoints[kind], "cpu", quant=CONFIGS.get(name, name))
    engine = llm.engine
    found = ledger(setting_of(engine.manifest, engine.dtype, engine.device)).items
    told = sum(i.bytes for i in found if i.kind == "weights" and i.name != "rotary table")
    assert told == sum(p.nbytes for p in engine.model.parameters())


def test_the_manifest_holds_the_scheme_and_every_tensor(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = build(checkpoints["tied"], tmp_path / "engine", quant=MIXED, device="cpu", proof=False)
    manifest = Manifest.read(folder)
    assert manifest.quant == MIXED
    names = [n.rpartition(".")[2] for n in manifest.tensors if n.startswith("layers.0.self_attn.qkv_proj")]
    assert names == ["words", "scales", "zeros"]
    kinds = [(manifest.tensors[f"layers.0.self_attn.qkv_proj.{n}"].dtype) for n in names]
    assert kinds == ["I16", "F32", "U8"]
    assert {n for n in manifest.tensors if n.startswith("lm_head")} == {"lm_head.words", "lm_head.scales"}
    again = build(checkpoints["tied"], tmp_path / "again", quant=MIXED, device="cpu", proof=False)
    assert compare_engines(folder, again).equal
    other = build(checkpoints["tied"], tmp_path / "other", quant="w8a16", device="cpu", proof=False)
    changes = {change.name: (change.left, change.right) for change in compare_engines(folder, other).config}
    assert changes["quant.scheme"] == ("w4a16", "w8a16")


def test_one_layer_replays(checkpoints: dict[str, Path]) -> None:
    llm = LLM(checkpoints["llama"], "cpu", quant=MIXED)
    for layer in (0, 1):
        found = replay(capture_layer(llm, random_ids(7), layer), torch.device("cpu"))
        assert found.agrees
        assert found.repeats


def test_random_weights_in_fewer_bits(checkpoints: dict[str, Path]) -> None:
    spec = SideSpec(random_weights=str(checkpoints["llama"]), device="cpu", quant="w4a16", max_batch_size=2)
    side = open_side(spec)
    assert side.facts()["quantization"] == "w4a16"
    assert side.answer([Ask(3, 2)], [[1, 2, 3]]).tokens == (2,)


def test_what_cannot_be_asked_for(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    typo = QuantConfig("w8a16", layers={"layers.*.mlp.dwon_proj": "none"})
    with pytest.raises(ConfigError, match=r"match no linear layer.*dwon_proj.*down_proj"):
        build(checkpoints["llama"], tmp_path / "engine", quant=typo, device="cpu")
    assert not (tmp_path / "engine").exists()
    folder = build(checkpoints["llama"], tmp_path / "engine", quant="w8a16", device="cpu", proof=False)
    with pytest.raises(ConfigError, match=r"fixed .*seen: \['quant'\].*own, quantization w8a16.*--quant …`"):
        LLM(folder, "cpu", quant="w4a16")
    with pytest.raises(CheckpointError, match=r"is an engine, not a checkpoint.*give the checkpoint"):
        build(folder, tmp_path / "other", quant="w4a16", device="cpu")


class TestVerb:
    def test_build_and_inspect(self, checkpoints: dict[str, Path], tmp_path: Path) -> None:
        path = tmp_path / "mixed.yaml"
        path.write_text("scheme: w4a16\nlayers:\n  layers.1.mlp.down_proj: w8a16\n")
        flags = ("--quant", str(path), "--group-size", "64", "--quant-head", "--no-proof", "--device", "cpu")
        engine = str(tmp_path / "engine")
        done = ingot("build", str(checkpoints["llama"]), "-o", engine, *flags)
        assert done.exit_code == 0, done.stderr
        text = ingot("inspect", engine, "--tensors").stdout
        assert "w4a16+w8a16, head w8a16, one scale per 64 columns, asymmetric, by rounding" in text
        assert "by rounding, 1 layer pattern over w4a16\n" in text
        assert "  layers.1.mlp.down_proj: w8a16\n" in text
        assert "layers.0.mlp.down_proj.words" in text
        told = json.loads(ingot("inspect", engine, "--json").stdout)
        assert told["quant"]["layers"] == {"layers.1.mlp.down_proj": "w8a16"}

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--quant", "w3"), ("--quant", "w8a16", "w4a16")),
            (("--quant", "w4a16", "--group-size", "48"), ("--group-size", "128")),
            (("--quant", "w8a16", "--group-size", "64"), ("--group-size",)),
            (("--group-size", "64"), ("--group-size",)),
            (("--quant", "w8a16", "--asymmetric"), ("--asymmetric",)),
            (("--quant", "nowhere.yaml"), ("--quant", "nowhere.yaml")),
        ],
    )
    def test_misuse(
        self, checkpoints: dict[str, Path], tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
    ) -> None:
        done = ingot("build", str(checkpoints["llama"]), "-o", str(tmp_path / "engine"), *flags)
        assert done.exit_code == 2
        for word in words:
            assert word in done.stderr

    def test_a_pattern_of_no_layer_is_misuse(self, checkpoints: dict[str, Path], tmp_path: Path) -> None:
        path, engine = tmp_path / "mixed.yaml", tmp_path / "engine"
        path.write_text('scheme: w4a16\nlayers: {"*.dwon_proj": w8a16}\n')
        done = ingot(
            "build", str(checkpoints["llama"]), "-o", str(engine), "--quant", str(path), "--device", "cpu"
        )
        assert (done.exit_code, engine.exists()) == (2, False)
        assert "dwon_proj" in done.stderr
        assert "--quant: layers" in done.stderr


def test_seven_b_in_bytes() -> None:
    """A 7B's attention and MLP: a byte and half a byte a weight, and the scales."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_layers": 2, "num_heads": 32}
    shape = {"vocab_size": 1000, "num_kv_heads": 32, "head_dim": 128, "max_positions": 64}
    config = DecoderConfig("llama", rope=RopeConfig(dim=128), **sizes, **shape)
    rows = 4 * 4096 + 2 * 11008 + 4096
    weights = 4 * 4096**2 + 3 * 4096 * 11008
    found = {
        q: sum(weight_bytes(config, QuantConfig(q), torch.float16)[k] for k in ("attention", "mlp")) // 2
        for q in ("none", "w8a16", "w4a16")
    }
    assert found == {
        "none": 2 * weights,
        "w8a16": weights + 2 * rows,
        "w4a16": weights // 2 + weights // 128 * 3,
    }


def test_only_the_first_side_of_an_evaluation_is_quantized(checkpoints: dict[str, Path]) -> None:
    path = str(checkpoints["llama"])
    one = EvalSpec(path, device="cpu", quant="w8a16")
    other = other_spec(one, path, "auto", 1)
    with open_eval_side(one) as quantized, open_eval_side(other) as dense:
        assert [side.facts()["quantization"] for side in (quantized, dense)] == ["w8a16", "none"]
        assert not torch.equal(quantized.logits([1, 2, 3]), dense.logits([1, 2, 3]))
