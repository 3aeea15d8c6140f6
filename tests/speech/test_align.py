"""``align`` goes from log-mel to logits of a Whisper, and names the first stage that is wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import LLM
from ingot.audio import log_mel as mels
from ingot.building.builder import build
from ingot.errors import CheckpointError, ConfigError
from ingot.measure.align.align_session import Report, align
from ingot.measure.align.engine_stages import record_engine
from ingot.measure.align.stage_verdict import SERVED
from ingot.measure.align.stages.stage_names import stage_names
from tests.e2e.terminal import ingot
from tests.encoders.speech import write_speech
from tests.speech.openai import openai_state, save_openai

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


def faulty(
    checkpoint: Path, folder: Path, name: str, changed: Callable[[torch.Tensor], torch.Tensor]
) -> Path:
    """The checkpoint with another tensor."""
    wrong = shutil.copytree(checkpoint, folder / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    tensors[f"model.{name}"] = changed(tensors[f"model.{name}"]).contiguous()
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    return wrong


def test_a_clean_engine_is_aligned_at_every_stage(tiny_engine: Path, tiny_checkpoint: Path) -> None:
    report = aligned(tiny_engine, tiny_checkpoint)
    assert report.aligned, report.first_stage
    assert report.reference == "Hugging Face's WhisperForConditionalGeneration, fp32"
    assert list(dict.fromkeys(row.stage for row in report.rows)) == [*stage_names(2, 2), SERVED]
    assert all(row.alone is not None for row in report.rows if row.stage not in ("log_mel", SERVED))
    assert max(row.difference.relative for row in report.rows) < 2e-6


@pytest.mark.stays("conv2", "cross keys", "decoder's MLP")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_layer_is_named(tiny_checkpoint: Path, tmp_path: Path, fault: str) -> None:
    name, changed, stage = FAULTS[fault]
    wrong = faulty(tiny_checkpoint, tmp_path, name, changed)
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


@pytest.mark.stays("fp16-w8a16")
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


@pytest.mark.stays("fp32-w8a8")
@pytest.mark.parametrize(("dtype", "quant"), [("fp32", "none"), ("bf16", "none"), ("fp32", "w8a8")])
def test_our_own_path(tiny_checkpoint: Path, tmp_path: Path, dtype: str, quant: str) -> None:
    """The floor is another order of sums in both halves, or the dtype."""
    engine = build(tiny_checkpoint, tmp_path / "engine", dtype=dtype, quant=quant, device="cpu", proof=False)
    report = align(engine, tiny_checkpoint, [IDS], steps=1, original="ingot", device="cpu")
    assert report.aligned, report.first_stage
    assert report.reference == "Ingot's checking decoder, fp32"
    assert list(dict.fromkeys(row.stage for row in report.rows)) == [*stage_names(2, 2), SERVED]


@pytest.mark.stays("bf16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_beside_another(
    tiny_engine: Path, tiny_checkpoint: Path, tmp_path: Path, dtype: str
) -> None:
    engine = build(tiny_checkpoint, tmp_path / "engine", dtype=dtype, device="cpu", proof=False)
    report = aligned(engine, tiny_engine)
    assert report.aligned, report.first_stage
    assert report.reference == "the engine tiny-whisper-engine, fp32"
    assert report.tensors is None
    assert list(dict.fromkeys(row.stage for row in report.rows)) == [*stage_names(2, 2), SERVED]
    floors = {row.stage: row.floor for row in report.rows if row.step == 0}
    assert min(floors[name] for name in ("encoder.layers.1.mlp", "layers.0.cross_keys", "layers.1.mlp")) > 0


def test_an_engine_that_differs_from_another(
    tiny_engine: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A wrong layer is named; fewer bits are told of."""
    name, changed, stage = FAULTS["encoder's MLP"]
    wrong = faulty(tiny_checkpoint, tmp_path, name, changed)
    report = aligned(build(wrong, tmp_path / "engine", device="cpu", proof=False), tiny_engine, steps=1)
    assert report.first is not None
    assert (report.first_stage, report.first.alone) == (stage, True)
    narrow = build(tiny_checkpoint, tmp_path / "narrow", quant="w8a8", device="cpu", proof=False)
    report = aligned(narrow, tiny_engine, steps=1)
    assert not report.aligned
    assert "differences are expected" in (report.quant or "")
    same = shutil.copytree(narrow, tmp_path / "same")
    assert aligned(narrow, same, steps=1).aligned


def test_openai_s_file_as_the_original(tmp_path: Path) -> None:
    """Run by Hugging Face's class, tensors and stop ids compared too; fewer bits beside their own values."""
    model = write_speech(tmp_path / "model", 4, vocab_size=51864, encoder_ffn_dim=128, decoder_ffn_dim=128)
    file = save_openai(model, tmp_path / "tiny.en.pt")
    report = aligned(build(file, tmp_path / "engine", device="cpu", proof=False), file, steps=1)
    assert report.aligned, report.first_stage
    assert report.reference == "Hugging Face's WhisperForConditionalGeneration, fp32"
    assert report.tensors is not None
    assert report.tensors.compared > 40
    assert report.stops.expected == (50256,)
    narrow = build(file, tmp_path / "narrow", quant="w8a16", device="cpu", proof=False)
    assert aligned(narrow, file, steps=1).aligned
    state = openai_state(model)
    state["decoder.blocks.1.mlp.2.weight"] *= 1.1
    wrong = save_openai(model, tmp_path / "wrong.pt", model_state_dict=state)
    report = aligned(tmp_path / "engine", wrong, steps=1)
    assert report.first_stage == "layers.1.mlp"
    assert report.bad_tensors == ["layers.1.mlp.down_proj.weight"]


def test_other_originals_are_refused(tiny_engine: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the reference is the engine itself"):
        align(tiny_engine, tiny_engine, [IDS], device="cpu")
    other = shutil.copytree(tiny_engine, tmp_path / "other")
    with pytest.raises(CheckpointError, match="does not run an engine"):
        align(tiny_engine, other, [IDS], original="hf", device="cpu")
    recorded = tmp_path / "trace.safetensors"
    record_engine(LLM(tiny_checkpoint, "cpu"), recorded, IDS, 1)
    with pytest.raises(ConfigError, match="not compared with a trace"):
        align(tiny_engine, recorded, device="cpu")
    write_speech(tmp_path / "wide", d_model=64)
    wide = build(tmp_path / "wide", tmp_path / "wide-engine", device="cpu", proof=False)
    with pytest.raises(CheckpointError, match=r"a different model.*hidden size 64.*hidden size 32"):
        align(tiny_engine, wide, [IDS], device="cpu")


def test_the_verb(tiny_engine: Path, tiny_checkpoint: Path) -> None:
    shown = ingot("align", tiny_engine, "--reference", tiny_checkpoint, "--steps", "1")
    assert shown.exit_code == 0, shown.output
    for stage in (r"encoder\.layers\.\d\.mlp", r"layers\.\d\.cross_attention"):  # which one is noise
        assert re.search(rf"^{stage} .* worst of 2 layers", shown.output, re.MULTILINE), stage
