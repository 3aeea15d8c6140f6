"""Engines of RPTQ: built, told of, proven, aligned; their order changes nothing, and it pays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ingot import LLM, build
from ingot.align.session import align
from ingot.config.quant import QuantConfig
from ingot.engine.manifest import Manifest
from ingot.llm.verify import verify
from tests.tiny_models import random_ids, save_model, tiny_config

CPU = torch.device("cpu")
CONFIGS = {
    "w8a8": QuantConfig("rptq-w8a8", 32),
    "w4a8": QuantConfig("rptq-w4a8", 32),
    "w4a4": QuantConfig("rptq-w4a4", 32),
    "rounded": QuantConfig("rptq-w4a8", 64, method="round", head="w8a16"),
    "mixed": QuantConfig(
        "rptq-w8a8",
        32,
        layers={"*.qkv_proj": "w4a16", "layers.1.mlp.gate_up_proj": "none", "*.1.*.o_proj": "w8a8"},
    ),
}
OFF = {
    "w8a8": 0.15,
    "w4a8": 0.5,
    "w4a4": 0.9,
    "rounded": 0.6,
    "mixed": 0.4,
}  # w4a16 of these tiny models: 0.3
KINDS = ("llama", "qwen2", "qwen3", "gpt2", "relu", "tied")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in ("llama", "qwen2", "qwen3", "gpt2"):
        save_model(tiny_config(kind), root / kind, seed=3)
    save_model(tiny_config("gpt2", activation_function="relu"), root / "relu", seed=3)
    save_model(tiny_config("llama", tie_word_embeddings=True), root / "tied", seed=3)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "ids.jsonl"
    path.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return path


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_built_told_of_and_proven(
    checkpoints: dict[str, Path], samples: Path, kind: str, name: str, tmp_path: Path
) -> None:
    quant = CONFIGS[name]
    if kind in ("gpt2", "relu"):
        quant = quant.replace(layers={n.replace("gate_up", "up"): s for n, s in quant.layers.items()})
    folder = build(checkpoints[kind], tmp_path / "e", quant=quant, dtype="bf16", calib=samples, device="cpu")
    manifest = Manifest.read(folder)
    assert manifest.quant == quant
    assert manifest.calibration is not None
    found = verify(folder, "cpu", note=False)
    assert found.verdict == "proven", found.failures
    ids = random_ids(30, seed=5)
    exact, near = LLM(checkpoints[kind], "cpu").logits(ids), LLM(folder, "cpu").logits(ids)
    assert float((near - exact).norm() / exact.norm()) < OFF[name]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["w8a8", "w4a4", "mixed"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_it_is_aligned_with_what_its_numbers_mean(
    checkpoints: dict[str, Path], samples: Path, kind: str, name: str, dtype: str, tmp_path: Path
) -> None:
    quant = CONFIGS[name]
    if kind == "gpt2":
        quant = quant.replace(layers={n.replace("gate_up", "up"): s for n, s in quant.layers.items()})
    options = {"calib": samples, "device": "cpu", "proof": False, "dtype": dtype}
    folder = build(checkpoints[kind], tmp_path / "e", quant=quant, **options)  # type: ignore[arg-type]
    for original in ("hf", "ingot"):
        report = align(folder, checkpoints[kind], [random_ids(19)], steps=2, device="cpu", original=original)
        assert report.aligned, (original, report.first_stage)


def test_rounded_layers_beside_rounded_weights_of_4_bits(
    checkpoints: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    """With the method ``round`` a build needs samples for RPTQ's layers alone; others are packed."""
    quant = QuantConfig("rptq-w8a8", 32, method="round", layers={"*.gate_up_proj": "w4a16"})
    folder = build(checkpoints["llama"], tmp_path / "e", quant=quant, calib=samples, device="cpu")
    assert "layers.1.mlp.gate_up_proj.words" in Manifest.read(folder).tensors
    found = verify(folder, "cpu", note=False)
    assert found.verdict == "proven", found.failures
