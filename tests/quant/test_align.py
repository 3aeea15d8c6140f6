"""An engine in fewer bits is held to its own weights, not to those that it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot import LLM, build
from ingot.align.precision import permute_channels
from ingot.align.report import facts, report_json
from ingot.align.session import align
from ingot.config.quant import QuantConfig
from ingot.engine.dequantized import write_dequantized
from ingot.engine.int8_inputs import Int8Input, rounding
from ingot.errors import CheckpointError
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


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("original", ["hf", "ingot"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_with_activations_in_8_bits(kind: str, original: str, dtype: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path / "checkpoint")
    engine = build(folder, tmp_path / "engine", quant="w8a8", dtype=dtype, device="cpu", proof=False)
    prompts = [random_ids(9), random_ids(21, seed=2)]
    report = align(engine, folder, prompts, steps=2, device="cpu", dtype=dtype, original=original)
    assert report.aligned, report.first_stage
    assert "rounds activations as it does" in dict(facts(report))["quantized"]
    exact = align(folder, folder, prompts, steps=2, device="cpu", dtype=dtype, original=original)
    floors = [max(row.floor for row in one.rows) for one in (report, exact)]
    assert floors[0] < 0.2
    assert floors[1] < floors[0]


@pytest.mark.parametrize("original", ["hf", "ingot"])
def test_scales_of_other_rows_are_found(
    original: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama", tmp_path / "checkpoint")
    engine = build(folder, tmp_path / "engine", quant="w8a8", device="cpu", proof=False)
    stored = LLM.__init__

    def damaged(self: LLM, *args: object, **options: object) -> None:
        stored(self, *args, **options)  # type: ignore[arg-type]
        down = self.engine.model.layers[1].mlp.down_proj
        if "scales" in down._parameters:
            down.scales.copy_(down.scales.roll(1))

    monkeypatch.setattr(LLM, "__init__", damaged)
    report = align(engine, folder, [random_ids(9)], steps=0, device="cpu", original=original)
    assert report.first_stage == "layers.1.mlp"


def test_a_class_without_the_product_is_refused() -> None:
    one = Int8Input("layers.0.mlp.down_proj", ("model.layers.0.mlp.down_proj",), 0, None)
    with pytest.raises(CheckpointError, match=r"no such linear layer.*down_proj.*--original ingot"):  # noqa: SIM117
        with rounding(torch.nn.Linear(2, 2), [one]):
            pass


@pytest.mark.parametrize(("quant", "off"), [("w4a16", 1e-5), (MIXED, 1e-5), ("w8a8", 0.1)])
def test_renamed_channels_are_the_same_model(quant: str | QuantConfig, off: float, tmp_path: Path) -> None:
    """The noise of a trace's comparison is another order of sums, not another model."""
    llm = LLM(checkpoint("llama", tmp_path / "checkpoint"), "cpu", quant=quant)
    before = llm.logits(random_ids(12))
    permute_channels(llm.engine.model)
    after = llm.logits(random_ids(12))
    assert 0 < float((after - before).norm() / before.norm()) < off
