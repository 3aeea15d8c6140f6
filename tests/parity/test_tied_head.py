"""A head stored beside the embedding that config.json ties it to: of its own where the two differ, as
transformers 5 takes it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, WhisperForConditionalGeneration

from ingot import LLM, Input, Prompt, build
from ingot.building.ledger_source import read_setting
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.manifest import Manifest
from ingot.measure.align.align_session import align
from ingot.proof.verify_engine import verify
from tests.e2e.tiny import write_tiny
from tests.encoders.speech import FRAMES, MELS, write_speech
from tests.measure.align import old_qwen
from tests.tiny_models import edit_config, random_ids, save_model, tiny_config

KINDS = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "opt"]
EMBEDDINGS = {
    "gpt2": "transformer.wte.weight",
    "opt": "model.decoder.embed_tokens.weight",
    "whisper": "model.decoder.embed_tokens.weight",
}
EMBEDDINGS["qwen"] = "transformer.wte.weight"


def add_head(folder: Path, kind: str, *, own: bool, dtype: torch.dtype = torch.float32) -> None:
    """Store a head beside the embedding: another tensor, or a copy."""
    file, name = folder / "model.safetensors", "proj_out.weight" if kind == "whisper" else "lm_head.weight"
    tensors = load_file(file)
    embedding = tensors[EMBEDDINGS.get(kind, "model.embed_tokens.weight")]
    tensors[name] = (embedding.flip(1) if own else embedding).to(dtype).clone()
    save_file(tensors, file, metadata={"format": "pt"})


def write(folder: Path, kind: str, *, own: bool) -> Path:
    save_model(tiny_config(kind, tie_word_embeddings=True), folder, seed=3)
    add_head(folder, kind, own=own)
    return folder


def theirs(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.grid(1)
@pytest.mark.parametrize("own", [True, False], ids=["own", "copy"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_stored_head(kind: str, own: bool, tmp_path: Path) -> None:
    folder, ids = write(tmp_path, kind, own=own), random_ids(20, seed=4)
    llm = LLM(folder, "cpu")
    torch.testing.assert_close(llm.logits(ids), theirs(folder, ids), rtol=1e-4, atol=1e-4)
    assert llm.engine.manifest.model.tie_word_embeddings == (not own)
    assert llm.engine.model.tied == (not own)
    assert read_setting(str(folder)).model.tie_word_embeddings == (not own)


def test_of_speech(tmp_path: Path) -> None:
    """Whisper's is proj_out; a config that does not tie it is read, too."""
    write_speech(tmp_path)
    add_head(tmp_path, "whisper", own=True)
    ids, features = random_ids(9, seed=1), torch.randn(MELS, FRAMES)
    for tied in (True, False):
        edit_config(tmp_path, tie_word_embeddings=tied)
        model = WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            expected = model(features[None], decoder_input_ids=torch.tensor([ids])).logits[0]
        found = LLM(tmp_path, "cpu").logits(Prompt([Input(features), ids]))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_of_qwen_v1(tmp_path: Path) -> None:
    """Its class never ties the two, and stores its head."""
    folder = write_tiny(tmp_path / "qwen")
    ids = random_ids(12, seed=2, vocab_size=old_qwen.VOCAB)
    with torch.no_grad():
        expected = old_qwen.load(str(folder))(torch.tensor([ids]))[0]
    edit_config(folder, tie_word_embeddings=True)
    torch.testing.assert_close(LLM(folder, "cpu").logits(ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quant", [None, QuantConfig("w8a16", head="w8a16")], ids=["dense", "w8a16"])
def test_its_engine_is_proven_and_aligned(quant: QuantConfig | None, tmp_path: Path) -> None:
    folder = write(tmp_path / "llama", "llama", own=True)
    engine = build(folder, tmp_path / "engine", device="cpu", quant=quant)
    assert any(name.startswith("lm_head.") for name in Manifest.read(engine).tensors)
    assert verify(engine, "cpu", note=False).verdict == "proven"
    assert align(engine, folder, [random_ids(9)], steps=1, device="cpu").aligned


def test_a_copy_is_not_stored_twice(tmp_path: Path) -> None:
    folder = write(tmp_path / "llama", "llama", own=False)
    engine = build(folder, tmp_path / "engine", device="cpu", proof=False)
    assert not any(name.startswith("lm_head.") for name in Manifest.read(engine).tensors)


def test_a_head_in_another_dtype_is_its_own_where_values_differ(tmp_path: Path) -> None:
    save_model(tiny_config("llama", tie_word_embeddings=True), tmp_path, seed=3)
    add_head(tmp_path, "llama", own=False, dtype=torch.bfloat16)
    ids = random_ids(8)
    llm = LLM(tmp_path, "cpu")
    assert not llm.engine.model.tied
    torch.testing.assert_close(llm.logits(ids), theirs(tmp_path, ids), rtol=1e-4, atol=1e-4)


def test_align_names_the_head_of_an_engine_that_is_tied(tmp_path: Path) -> None:
    """Such as one built before the stored head was looked at."""
    folder = write(tmp_path / "llama", "llama", own=False)
    engine = build(folder, tmp_path / "engine", device="cpu", proof=False)
    add_head(folder, "llama", own=True)
    report = align(engine, folder, [random_ids(9)], steps=1, device="cpu")
    assert not report.aligned
    assert report.tensors is not None
    (difference,) = report.tensors.differences
    assert (difference.name, report.first_stage) == ("lm_head.weight", "logits")
    assert "the head is the embedding (tied), and the reference has a head of its own" in difference.text


def test_an_engine_of_a_tied_model_has_no_head_to_compare(tmp_path: Path) -> None:
    save_model(tiny_config("llama", tie_word_embeddings=True), tmp_path / "llama", seed=3)
    assert "lm_head.weight" not in load_file(tmp_path / "llama" / "model.safetensors")
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["tie_word_embeddings"]
    engine = build(tmp_path / "llama", tmp_path / "engine", device="cpu", proof=False)
    report = align(engine, tmp_path / "llama", [random_ids(9)], steps=1, device="cpu")
    assert report.aligned
