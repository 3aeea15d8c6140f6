"""An engine in fewer bits is held to its own weights, not to those that it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot import LLM, build
from ingot.align.report import facts, report_json
from ingot.align.session import align
from ingot.config.quant import QuantConfig
from ingot.engine.dequantized import write_dequantized
from ingot.layers.linear import linears
from tests.e2e.tiny import write_tiny
from tests.tiny_models import random_ids, save_model, tiny_config

MIXED = QuantConfig("w4a16", 32, head="w8a16", layers={"*.o_proj": "none", "layers.1.*": "w8a16"})


def checkpoint(kind: str, folder: Path) -> Path:
    if kind == "qwen":
        return write_tiny(folder)
    tied = {"tie_word_embeddings": True} if kind == "qwen2" else {}
    save_model(tiny_config(kind, **tied), folder, seed=3)
    return folder


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen", "gpt2"])
def test_a_dequantized_checkpoint_has_the_engines_weights(kind: str, tmp_path: Path) -> None:
    original = checkpoint(kind, tmp_path / "checkpoint")
    engine = build(original, tmp_path / "engine", quant=MIXED, dtype="fp32", device="cpu", proof=False)
    folder = write_dequantized(engine, original, tmp_path / "dequantized")
    ours, theirs = LLM(engine, "cpu"), LLM(folder, "cpu")
    for name, linear in linears(theirs.engine.model).items():
        own = linears(ours.engine.model)[name]
        assert torch.equal(linear.dequantized(torch.float32), own.dequantized(torch.float32)), name
    ids = random_ids(12)
    torch.testing.assert_close(ours.logits(ids), theirs.logits(ids), rtol=1e-4, atol=1e-4)


def test_of_some_layers(tmp_path: Path) -> None:
    original = checkpoint("llama", tmp_path / "checkpoint")
    engine = build(original, tmp_path / "engine", quant="w8a16", layers="1:2", device="cpu", proof=False)
    folder = write_dequantized(engine, original, tmp_path / "dequantized")
    ours, theirs = LLM(engine, "cpu"), LLM(folder, "cpu", layers="1:2")
    ids = random_ids(12)
    torch.testing.assert_close(ours.logits(ids), theirs.logits(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen", "gpt2"])
def test_it_is_aligned(kind: str, dtype: str, tmp_path: Path) -> None:
    original = checkpoint(kind, tmp_path / "checkpoint")
    engine = build(original, tmp_path / "engine", quant=MIXED, dtype=dtype, device="cpu", proof=False)
    report = align(engine, original, [random_ids(9)], steps=2, device="cpu", dtype=dtype)
    assert report.aligned, report.first_stage
    told = dict(facts(report))["quantized"]
    assert "w4a16" in told
    assert "the reference computes with these weights" in told
    assert report_json(report)["quantized"] == told


def test_a_wrong_scale_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoint("llama", tmp_path / "checkpoint")
    engine = build(original, tmp_path / "engine", quant="w8a16", device="cpu", proof=False)
    stored = LLM.__init__

    def damaged(self: LLM, *args: object, **options: object) -> None:
        stored(self, *args, **options)  # type: ignore[arg-type]
        layer = self.engine.model.layers[1]
        if "scales" in layer.mlp.down_proj._parameters:
            layer.mlp.down_proj.scales.mul_(1.02)

    monkeypatch.setattr(LLM, "__init__", damaged)
    report = align(engine, original, [random_ids(9)], steps=0, device="cpu")
    assert report.first_stage == "layers.1.mlp"


def test_without_fewer_bits_nothing_is_told(tmp_path: Path) -> None:
    original = checkpoint("llama", tmp_path / "checkpoint")
    engine = build(original, tmp_path / "engine", device="cpu", proof=False)
    report = align(engine, original, [random_ids(5)], steps=0, device="cpu")
    assert report.quant is None
    assert "quantized" not in dict(facts(report))
