"""``align`` goes from log-mel to logits of a Whisper, and names the first stage that is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.align.session import Report, align
from ingot.align.stages import stage_names
from ingot.align.verdict import SERVED
from ingot.engine.builder import build
from ingot.errors import ConfigError
from ingot.processors import log_mel as mels
from tests.e2e.terminal import ingot
from tests.encoders.speech import write_speech

IDS = [1, 5, 9, 30]
FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "conv2": ("encoder.conv2.weight", lambda w: w.flip(2), "encoder.conv2"),
    "positions": ("encoder.embed_positions.weight", lambda w: w.roll(1, 0), "encoder.embedding"),
    "encoder's attention": (
        "encoder.layers.1.self_attn.k_proj.weight",
        lambda w: -w,
        "encoder.layers.1.attention",
    ),
    "encoder's MLP": ("encoder.layers.0.fc2.weight", lambda w: w * 1.01, "encoder.layers.0.mlp"),
    "encoder's norm": ("encoder.layer_norm.bias", lambda w: w + 0.01, "encoder.final_norm"),
    "cross keys": (
        "decoder.layers.1.encoder_attn.k_proj.weight",
        lambda w: w.roll(1, 0),
        "layers.1.cross_keys",
    ),
    "cross queries": (
        "decoder.layers.0.encoder_attn.q_proj.weight",
        lambda w: w * 1.1,
        "layers.0.cross_attention",
    ),
    "cross norm": (
        "decoder.layers.1.encoder_attn_layer_norm.weight",
        lambda w: w * 1.01,
        "layers.1.cross_norm",
    ),
    "decoder's MLP": ("decoder.layers.1.fc1.bias", lambda w: w + 0.1, "layers.1.mlp"),
}


def aligned(engine: Path, checkpoint: Path, steps: int = 2) -> Report:
    return align(engine, checkpoint, [IDS], steps=steps, device="cpu")


def test_a_clean_engine_is_aligned_at_every_stage(tiny_engine: Path, tiny_checkpoint: Path) -> None:
    report = aligned(tiny_engine, tiny_checkpoint)
    assert report.aligned, report.first_stage
    assert report.reference == "Hugging Face's WhisperForConditionalGeneration, fp32"
    assert list(dict.fromkeys(row.stage for row in report.rows)) == [*stage_names(2, 2), SERVED]
    assert all(row.alone is not None for row in report.rows if row.stage not in ("log_mel", SERVED))
    assert max(row.difference.relative for row in report.rows) < 2e-6


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_layer_is_named(tiny_checkpoint: Path, tmp_path: Path, fault: str) -> None:
    name, changed, stage = FAULTS[fault]
    wrong = shutil.copytree(tiny_checkpoint, tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    tensors[f"model.{name}"] = changed(tensors[f"model.{name}"]).contiguous()
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    report = aligned(build(wrong, tmp_path / "engine", device="cpu", proof=False), tiny_checkpoint, steps=1)
    assert report.first is not None
    assert (report.first_stage, report.first.alone) == (stage, True)
    assert report.bad_tensors


def test_wrong_mel_filters_are_named(
    tiny_engine: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mels._constants

    def wrong(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        window, filters = right(count, device)
        return window, filters.roll(1, 1)

    monkeypatch.setattr(mels, "_constants", wrong)
    assert aligned(tiny_engine, tiny_checkpoint).first_stage == "log_mel"


@pytest.mark.parametrize(("dtype", "quant"), [("bf16", "none"), ("fp16", "w8a16"), ("fp32", "w8a8")])
def test_other_dtypes_and_schemes_are_aligned(
    tiny_checkpoint: Path, tmp_path: Path, dtype: str, quant: str
) -> None:
    build(tiny_checkpoint, tmp_path / "engine", dtype=dtype, quant=quant, device="cpu", proof=False)
    report = aligned(tmp_path / "engine", tiny_checkpoint)
    assert report.aligned, report.first_stage


def test_turbo_has_more_encoder_layers_than_decoder_layers(tmp_path: Path) -> None:
    write_speech(tmp_path / "turbo", encoder_layers=3, decoder_layers=1)
    report = aligned(tmp_path / "turbo", tmp_path / "turbo", steps=1)
    assert report.aligned, report.first_stage
    assert {row.stage for row in report.rows} == {*stage_names(1, 3), SERVED}


def test_other_originals_are_refused(tiny_engine: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="Hugging Face's class alone"):
        align(tiny_engine, tiny_checkpoint, [IDS], original="ingot", device="cpu")


def test_the_verb(tiny_engine: Path, tiny_checkpoint: Path) -> None:
    shown = ingot("align", tiny_engine, "--reference", tiny_checkpoint, "--steps", "1")
    assert shown.exit_code == 0, shown.output
    assert "encoder.layers.1.mlp" in shown.output
    assert "layers.1.cross_attention" in shown.output
