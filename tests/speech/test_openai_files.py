"""OpenAI's .pt files give the engines that Hugging Face's folders of the same weights give."""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, build
from ingot.building.ledger_source import read_setting
from ingot.engine.engine_facts import describe
from ingot.engine.manifest import Manifest
from ingot.errors import CheckpointError, NoSuchPathError, TokenizerError
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.measure.side.side_spec import SideSpec, longest, model_of
from ingot.speech.transcriber import Transcriber
from tests.e2e.terminal import ingot
from tests.encoders.speech import write_speech
from tests.speech.openai import openai_dims, openai_state, save_openai

SIZES = {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 1500}
VOCABULARIES = {"tiny.en": 51864, "tiny": 51865, "large-v3": 51866}


@dataclass(frozen=True)
class Both:
    """One model twice. ``file`` lies beside both of OpenAI's vocabularies, ``folder`` has its own."""

    folder: Path
    file: Path
    model: Any


@pytest.fixture(scope="module")
def cache(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where OpenAI's files lie, with both vocabularies."""
    place = tmp_path_factory.mktemp("whisper")
    for name in ("gpt2", "multilingual"):
        shutil.copy(data / "tokenizers" / "whisper" / f"{name}.tiktoken", place)
    return place


@pytest.fixture(scope="module", params=VOCABULARIES)
def both(request: pytest.FixtureRequest, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    size, folder = VOCABULARIES[request.param], tmp_path_factory.mktemp("folder")
    end = 50256 if size == 51864 else 50257
    ids = {f"{name}_token_id": end for name in ("eos", "bos", "pad")}
    mels = 128 if request.param == "large-v3" else 80
    model = write_speech(
        folder, 3, vocab_size=size, num_mel_bins=mels, decoder_start_token_id=end + 1, **ids, **SIZES
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(cache / ("gpt2.tiktoken" if end == 50256 else "multilingual.tiktoken"), folder)
    return Both(folder, save_openai(model, cache / f"{request.param}.pt"), model)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Of a vocabulary that nobody published, without a tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    model = write_speech(folder, 3, encoder_ffn_dim=128, decoder_ffn_dim=128)
    place = tmp_path_factory.mktemp("alone")
    return Both(folder, save_openai(model, place / "small.pt"), model)


@pytest.mark.stays("tiny")
def test_the_engine_is_the_same(both: Both, tmp_path: Path) -> None:
    theirs = build(both.folder, tmp_path / "theirs", device="cpu", proof=False)
    ours = build(both.file, tmp_path / "ours", device="cpu", proof=False)
    one, other = Manifest.read(ours), Manifest.read(theirs)
    assert one.tensors == other.tensors
    assert (ours / "weights.safetensors").read_bytes() == (theirs / "weights.safetensors").read_bytes()
    assert (one.model, one.stop_ids, one.source_dtype) == (other.model, other.stop_ids, other.source_dtype)
    assert {*one.files} == {*other.files}
    t, again = Transcriber(ours, "cpu", max_batch_size=2), Transcriber(theirs, "cpu", max_batch_size=2)
    assert t.vocabulary.tokens == again.vocabulary.tokens
    assert t.vocabulary.suppressed == again.vocabulary.suppressed
    features = torch.randn(one.model.encoder.features[0], 400, generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
    assert torch.equal(t.logits(features, [50258, 5]), again.logits(features, [50258, 5]))
    assert json.loads((ours / "tokenizer" / "config.json").read_text())["vocab_size"] == one.model.vocab_size


@pytest.mark.stays("tiny")
def test_a_file_is_run_described_and_planned_as_it_is(both: Both) -> None:
    t = Transcriber(both.file, "cpu", max_batch_size=2)
    features = torch.randn(both.model.config.num_mel_bins, 3000, generator=torch.Generator().manual_seed(1))
    wanted = both.model(features[None], decoder_input_ids=torch.tensor([[50258, 5, 6]])).logits[0].detach()
    found = t.logits(features, [50258, 5, 6])
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4
    reported = describe(both.file)
    assert (reported.kind, reported.bytes_on_disk) == ("checkpoint", both.file.stat().st_size)
    assert reported.num_parameters == describe(both.folder).num_parameters == both.model.num_parameters()
    assert read_setting(str(both.file)) == read_setting(str(both.folder))


def test_without_a_tokenizer_it_takes_ids(small: Both, tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in openai_state(small.model).items()}
    file = save_openai(small.model, tmp_path / "half.pt", model_state_dict=half)
    made = ingot("build", file, "-o", tmp_path / "engine", "--no-proof", "--device", "cpu")
    assert made.exit_code == 0, made.output
    manifest = Manifest.read(tmp_path / "engine")
    assert (manifest.build.dtype, manifest.source_dtype, manifest.stop_ids) == ("fp16", "fp16", ())
    prompt = Prompt([Input(torch.ones(small.model.config.num_mel_bins, 8)), [1, 2]])
    assert LLM(tmp_path / "engine", "cpu").logits(prompt).shape == (2, small.model.config.vocab_size)


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("was-here",)


def refused(file: Path, *words: str, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error) as caught:
        build(file, file.parent / "engine", device="cpu", proof=False)
    for word in words:
        assert word in str(caught.value)
    assert not (file.parent / "engine").exists()


def test_a_file_that_holds_code_runs_none(
    small: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(save_openai(small.model, tmp_path / "a.pt", dims=Hostile()), "holds code", "not loaded")
    refused(save_openai(small.model, tmp_path / "b.pt", more=Hostile()), "holds code", "not loaded")
    assert not (tmp_path / "was-here").exists()


def test_dims_that_are_missing_or_wrong(small: Both, tmp_path: Path) -> None:
    dims, file = openai_dims(small.model), tmp_path / "a.pt"
    refused(save_openai(small.model, file, dims=None), "no dims", "model_state_dict")
    refused(save_openai(small.model, file, model_state_dict=None), "no tensors under", "'model_state_dict'")
    lacking = {name: size for name, size in dims.items() if name != "n_mels"} | {"n_text_layer": "2"}
    refused(save_openai(small.model, file, dims=lacking), "dims", "n_mels: missing", "n_text_layer: '2'")
    refused(save_openai(small.model, file, dims=dims | {"n_audio_state": 64}), "differ in width", "64")
    refused(save_openai(small.model, file, dims=dims | {"n_text_head": 5}), "attention heads")
    refused(save_openai(small.model, file, dims=dims | {"n_mels": 80}), "mis-shaped", "encoder.conv1", "dims")
    refused(save_openai(small.model, file, dims=dims | {"n_text_layer": 3}), "missing", "decoder.layers.2")
    for name in ("n_audio_layer", "n_text_layer", "n_vocab", "n_audio_ctx", "n_text_ctx", "n_mels"):
        huge = save_openai(small.model, file, dims=dims | {name: 10**12})
        refused(huge, "out of range")


def test_tensors_that_are_missing_or_unknown(small: Both, tmp_path: Path) -> None:
    state, file = openai_state(small.model), tmp_path / "a.pt"
    less = {name: tensor for name, tensor in state.items() if name != "decoder.blocks.1.mlp.0.weight"}
    refused(save_openai(small.model, file, model_state_dict=less), "missing", "decoder.layers.1.fc1.weight")
    more = state | {"decoder.blocks.0.lora.weight": torch.ones(2)}
    refused(
        save_openai(small.model, file, model_state_dict=more), "unexpected", "decoder.blocks.0.lora.weight"
    )
    bad = state | {"encoder.ln_post.bias": torch.full((32,), float("nan"))}
    refused(save_openai(small.model, file, model_state_dict=bad), "not finite", "encoder.layer_norm.bias")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*TorchScript archive")
def test_files_that_are_cut_off_or_something_else(small: Both, tmp_path: Path) -> None:
    file, whole = tmp_path / "a.pt", small.file.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 100):
        file.write_bytes(whole[:cut])
        refused(file, str(file))
    scripted = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), scripted)
    file.write_bytes(scripted.getvalue())
    refused(file, "TorchScript")
    file.write_bytes(b"PK\x03\x04 no archive")
    refused(file, "truncated or damaged")
    refused(tmp_path / "none.pt", "no such file", "none.pt", error=NoSuchPathError)
    other = tmp_path / "x.safetensors"
    other.write_bytes(b"x")
    refused(other, "this is a file")


def test_verbs_that_compare_read_the_file(both: Both) -> None:
    """What a model is, and how long its requests are, before anything of it is loaded."""
    assert model_of(str(both.file)) == model_of(str(both.folder))
    assert longest(SideSpec(str(both.file))) == longest(SideSpec(str(both.folder)))


def test_another_models_vocabulary_is_refused(both: Both, cache: Path, tmp_path: Path) -> None:
    wrong = "multilingual" if "en" in both.file.stem else "gpt2"
    shutil.copy(both.file, tmp_path)
    shutil.copy(cache / f"{wrong}.tiktoken", tmp_path)
    refused(tmp_path / both.file.name, "not the vocabulary of this model", ".tiktoken", error=TokenizerError)
