"""Engines whose products are of 8 bits on both sides: built, loaded, run, proven, told of."""

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
from ingot.config.quant import QuantConfig
from ingot.config.runtime import RuntimeConfig
from ingot.engine.compare import compare_engines
from ingot.engine.manifest import Manifest
from ingot.engine.proof import read_proof
from ingot.errors import ConfigError
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight, int8_product
from ingot.layers.linear import linears
from ingot.llm.replay import replay
from ingot.llm.repro import capture_layer
from ingot.llm.repro import replay as replay_layer
from ingot.llm.verify import verify
from ingot.quant import int8_products
from ingot.quant.int8_both import Int8Both
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.tiny_models import random_ids, save_model, tiny_config

KINDS = ("llama", "mistral", "qwen", "qwen2", "qwen3", "gpt2", "tied")
MIXED = QuantConfig("w8a8", head="w8a16", layers={"*.down_proj": "w8a16", "layers.1.*": "none"})
CONFIGS = {
    "w8a8": QuantConfig("w8a8"),
    "a scale a tensor": QuantConfig("w8a8", weight_scales="tensor"),
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


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_built_and_in_memory_are_one(
    checkpoints: dict[str, Path], kind: str, name: str, tmp_path: Path
) -> None:
    folder = build(checkpoints[kind], tmp_path / "engine", quant=CONFIGS[name], device="cpu", proof=False)
    llm, dense = LLM(folder, "cpu"), LLM(checkpoints[kind], "cpu")
    assert llm.engine.manifest.quant == CONFIGS[name]
    prompt = random_ids(30, seed=5)
    found, exact = llm.logits(prompt), dense.logits(prompt)
    assert torch.equal(LLM(checkpoints[kind], "cpu", quant=CONFIGS[name]).logits(prompt), found)
    off = float((found - exact).norm() / exact.norm())
    assert 1e-4 < off < 0.1


def test_an_output_product_has_a_scale_a_head(checkpoints: dict[str, Path]) -> None:
    llm = LLM(checkpoints["llama"], "cpu", quant="w8a8")
    groups = {
        name.rpartition(".")[2]: linear.scheme.input_group
        for name, linear in linears(llm.engine.model).items()
        if isinstance(linear.scheme, Int8Both)
    }
    head_dim = llm.engine.manifest.model.head_dim
    assert groups == {"qkv_proj": 0, "o_proj": head_dim, "gate_up_proj": 0, "down_proj": 0}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("invariant", [False, True])
def test_company_does_not_matter(checkpoints: dict[str, Path], kind: str, invariant: bool) -> None:
    runtime = RuntimeConfig(batch_invariant=invariant)
    llm = LLM(checkpoints[kind], "cpu", quant="w8a8", runtime=runtime)
    prompts = [random_ids(n, seed=n) for n in (3, 17, 1)]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=0)
    together = llm.generate(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, params)[0]
        pairs = zip(alone.logprobs, output.logprobs, strict=True)
        if invariant:
            assert all(one.logprob == other.logprob for one, other in pairs)
        else:
            assert alone.token_ids == output.token_ids


def test_the_manifest_holds_the_scheme_and_every_tensor(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = build(checkpoints["tied"], tmp_path / "a", quant=MIXED, dtype="bf16", device="cpu", proof=False)
    manifest = Manifest.read(folder)
    assert manifest.quant == MIXED
    prefix = "layers.0.self_attn.qkv_proj."
    assert {n.removeprefix(prefix): e.dtype for n, e in manifest.tensors.items() if n.startswith(prefix)} == {
        "weight": "I8",
        "scales": "F32",
    }
    again = build(checkpoints["tied"], tmp_path / "b", quant=MIXED, dtype="bf16", device="cpu", proof=False)
    assert compare_engines(folder, again).equal
    narrow = LLM(folder, "cpu", compute_dtype="bf16").engine.model.layers[0].self_attn.qkv_proj
    assert narrow.scales.dtype == torch.float32
    assert narrow.weight.dtype == torch.int8
    other = build(checkpoints["tied"], tmp_path / "c", quant="w8a8", device="cpu", proof=False)
    changes = {change.name for change in compare_engines(folder, other).config}
    assert {"quant.head", "build.dtype"} <= changes


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_as_built_is_proven(
    checkpoints: dict[str, Path], kind: str, name: str, tmp_path: Path
) -> None:
    folder = build(checkpoints[kind], tmp_path / "engine", quant=CONFIGS[name], dtype="bf16", device="cpu")
    found = verify(folder, "cpu", note=False)
    assert found.verdict == "proven", found.failures
    proof = read_proof(folder)
    assert proof is not None
    floors = proof.claims.floors
    assert all(floors["bf16"].modules[n] >= floor for n, floor in floors["fp32"].modules.items())
    narrow = replay(LLM(folder, "cpu", compute_dtype="bf16"), proof.claims, lambda what: None)
    assert not narrow.failures
    assert max(narrow.worst.values()) > 0.1  # floors are of the size of what really happens


def test_scales_of_other_rows_are_named(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(checkpoints["llama"], tmp_path / "engine", quant="w8a8", device="cpu")

    def rolled(
        x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return int8_product(x, dataclasses.replace(weight, scales=weight.scales.roll(1)), dtype, bias)

    monkeypatch.setattr(int8_products, "multiply", rolled)
    found = verify(folder, "cpu", note=False)
    assert (found.verdict, found.first_bad_module) == ("failed", "layers.0.self_attn")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_one_layer_replays(checkpoints: dict[str, Path], kind: str, dtype: str) -> None:
    llm = LLM(checkpoints[kind], "cpu", quant="w8a8", compute_dtype=dtype)
    for layer in (0, 1):
        found = replay_layer(capture_layer(llm, random_ids(7), layer), torch.device("cpu"))
        assert found.repeats
        assert found.agrees


def test_random_weights(checkpoints: dict[str, Path]) -> None:
    spec = SideSpec(random_weights=str(checkpoints["llama"]), device="cpu", quant="w8a8", max_batch_size=2)
    side = open_side(spec)
    assert side.facts()["quantization"] == "w8a8"
    assert side.answer([Ask(3, 2)], [[1, 2, 3]]).tokens == (2,)


def test_static_needs_samples(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    static = QuantConfig("w8a8", activations="static")
    with pytest.raises(ConfigError, match=r"needs calibration data.*activations static.*--calib FILE"):
        build(checkpoints["llama"], tmp_path / "engine", quant=static, device="cpu")
    with pytest.raises(ConfigError, match=r"a static scale needs calibration.*--activations static"):
        LLM(checkpoints["llama"], "cpu", quant=static)


class TestVerb:
    def test_build_and_inspect(self, checkpoints: dict[str, Path], tmp_path: Path) -> None:
        engine = str(tmp_path / "engine")
        flags = ("--quant", "w8a8", "--weight-scales", "tensor", "--no-proof", "--device", "cpu")
        done = ingot("build", str(checkpoints["llama"]), "-o", engine, *flags)
        assert done.exit_code == 0, done.stderr
        text = " ".join(ingot("inspect", engine, "--tensors").stdout.split())
        assert "w8a8, dynamic activations, one weight scale per layer, by rounding" in text
        assert json.loads(ingot("inspect", engine, "--json").stdout)["quant"]["activations"] == "dynamic"
        planned = ingot("plan", str(checkpoints["llama"]), "--quant", "w8a8", "--gpu", "24GiB")
        assert planned.exit_code == 0
        assert "w8a8" in planned.stdout

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--quant", "w8a16", "--activations", "static"), ("--activations", "w8a8")),
            (("--quant", "w8a8", "--activations", "warm"), ("--activations", "static")),
            (("--quant", "w8a8", "--alpha", "0.5"), ("--alpha", "smoothquant")),
            (("--quant", "w8a8", "--method", "smoothquant", "--alpha", "two"), ("--alpha", "search")),
            (("--quant", "w8a8", "--method", "smoothquant"), ("--calib",)),
            (("--quant", "w8a8", "--activations", "static"), ("--calib",)),
            (("--quant", "w8a8", "--calib", "x.jsonl"), ("--activations static", "--calib")),
            (("--quant", "w8a8", "--weight-scales", "row"), ("--weight-scales", "tensor")),
        ],
    )
    def test_misuse(
        self, checkpoints: dict[str, Path], tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
    ) -> None:
        done = ingot("build", str(checkpoints["llama"]), "-o", str(tmp_path / "engine"), *flags)
        assert done.exit_code == 2
        for word in words:
            assert word in done.stderr
