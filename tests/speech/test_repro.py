"""``ingot repro`` on an engine that hears: layers of both halves, cut out and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import WhisperForConditionalGeneration

from ingot import LLM
from ingot.config.runtime_config import RuntimeConfig
from ingot.errors import CheckpointError, EngineError, RequestError
from ingot.kernels.attention import encoder_attention
from ingot.layers import cross_attention
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.proof.repro_bundle import read_bundle, write_bundle
from ingot.proof.repro_run import capture_layer, replay
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.support.shown_errors import raises_shown

CPU = torch.device("cpu")
IDS = [1, 5, 9, 30, 31]
PLACES = [("decoder", 0, 0), ("decoder", 1, 3), ("encoder", 0, 0), ("encoder", 1, 0)]
KV8: dict[str, Any] = {"runtime": RuntimeConfig(kv_dtype="int8")}


def transcribed(seed: int = 0, frames: int = 66) -> Prompt:
    features = torch.randn(8, frames, generator=torch.Generator().manual_seed(seed))
    return Prompt([Input(features), IDS])


def opened(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, "cpu", max_batch_size=2, **options)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> LLM:
    return opened(tiny_checkpoint)


@pytest.mark.parametrize(("half", "layer", "step"), PLACES)
def test_round_trip(llm: LLM, tmp_path: Path, half: str, layer: int, step: int) -> None:
    captured = capture_layer(llm, transcribed(), layer, step, half=half)
    write_bundle(tmp_path / "b.safetensors", captured)
    bundle = read_bundle(tmp_path / "b.safetensors")
    assert bundle.facts == captured.facts
    assert bundle.facts.counts == ((33,) if half == "encoder" else (len(IDS), *[1] * step))
    assert bundle.facts.name == f"{'encoder.' if half == 'encoder' else ''}layers.{layer}"
    found = replay(bundle, CPU)
    assert found.agrees
    assert found.against_output == 0
    assert 0 < found.against_expected == bundle.facts.output_error <= found.floor < 1e-5
    assert "share the recording" in bundle.facts.private


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": "fp16"},
        {"compute_dtype": "bf16", "quant": "encoder=w8a16,decoder=w4a16"},
        {"quant": "w8a8"},
        KV8,
        {"runtime": RuntimeConfig(batch_invariant=True, block_size=16)},
    ],
    ids=["fp16", "halves", "w8a8", "kv-int8", "invariant"],
)
def test_precisions(options: dict[str, Any], tiny_checkpoint: Path, tmp_path: Path) -> None:
    llm = opened(tiny_checkpoint, **options)
    for half, layer, step in PLACES[1:3]:
        write_bundle(tmp_path / "b.safetensors", capture_layer(llm, transcribed(), layer, step, half=half))
        found = replay(read_bundle(tmp_path / "b.safetensors"), CPU)
        assert (found.agrees, found.against_output, found.proves) == (True, 0, True)


def test_a_capture_reads_its_own_recording(llm: LLM) -> None:
    llm.generate([transcribed(1)], max_new_tokens=2)
    first, second = (capture_layer(llm, transcribed(seed), 1).inputs.encoded for seed in (0, 1))
    assert first is not None
    assert second is not None
    assert not torch.equal(first, second)
    exact = capture_layer(llm, transcribed(), 1, half="encoder").output
    norm = llm.engine.model.get_submodule("encoder.norm")
    assert torch.equal(norm(exact)[0], first)
    assert not any(module._forward_hooks for module in llm.engine.model.modules())


# --- faults of kernels -----------------------------------------------------------------------------------


def wrong_cross(*args: Any, **options: Any) -> torch.Tensor:
    """Scores that are not scaled as they should be."""
    query, *rest = args
    found: torch.Tensor = _PAGED(1.1 * query, *rest, **options)
    return found


_PAGED = cross_attention.paged_attention


def wrong_encoder() -> Any:
    """An attention of the encoder that does not see what comes after."""
    functional = torch.nn.functional

    def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return SimpleNamespace(**vars(functional) | {"scaled_dot_product_attention": causal})


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_a_wrong_kernel_is_distinguished_from_its_absence(
    half: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.safetensors"
    with monkeypatch.context() as wrong:
        if half == "decoder":
            wrong.setattr(cross_attention, "paged_attention", wrong_cross)
        else:
            wrong.setattr(encoder_attention, "F", wrong_encoder())
        bundle = capture_layer(llm, transcribed(), 1, half=half)
        write_bundle(path, bundle)
        assert bundle.facts.output_error > 100 * bundle.facts.floor
        found = replay(bundle, CPU)
        assert (found.agrees, found.repeats) == (False, True)
        other = capture_layer(llm, transcribed(), 1, half="encoder" if half == "decoder" else "decoder")
        assert other.facts.as_expected  # given what it was given, the other half is right
    shown = ingot("repro", "--run", path, "--device", "cpu")
    assert shown.exit_code == 0
    assert "the recorded failure does not occur here" in shown.stdout


# --- a trace's output ------------------------------------------------------------------------------------


def test_expected_from_a_trace(llm: LLM, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Hugging Face's: a key of the encoder's is not the decoder's, though both end in ``layers.1``."""
    model = WhisperForConditionalGeneration.from_pretrained(tiny_checkpoint).eval()
    kept: dict[str, torch.Tensor] = {"0/input_ids": torch.tensor([IDS])}
    for side in ("encoder", "decoder"):
        for i, layer in enumerate(model.get_submodule(f"model.{side}.layers")):

            def keep(_: Any, __: Any, out: Any, key: str = f"0/model.{side}.layers.{i}") -> None:
                kept[key] = (out[0] if isinstance(out, tuple) else out).detach().contiguous()

            layer.register_forward_hook(keep)
    prompt = transcribed(frames=80)
    with torch.no_grad():
        model(prompt.parts[0].features[None], decoder_input_ids=torch.tensor([IDS]))  # type: ignore[union-attr]
    path = tmp_path / "trace.safetensors"
    save_file(kept, path)
    for half in ("decoder", "encoder"):
        bundle = capture_layer(llm, prompt, 1, expected=path, half=half)
        assert bundle.facts.expected_from == "the trace trace.safetensors"
        assert bundle.facts.output_error < 1e-5
    for half, other in (("encoder", "decoder"), ("decoder", "encoder")):
        save_file({key: one for key, one in kept.items() if half not in key}, path)
        with pytest.raises(CheckpointError, match="does not contain"):
            capture_layer(llm, prompt, 1, expected=path, half=half)
        assert capture_layer(llm, prompt, 1, expected=path, half=other).facts.as_expected


# --- refused ---------------------------------------------------------------------------------------------


def test_what_cannot_be_extracted(llm: LLM, tmp_path: Path) -> None:
    for prompt, layer, step, half, reported in (
        (IDS, 0, 0, "decoder", "the prompt has no recording"),
        (transcribed(), 2, 0, "encoder", "no such layer; seen: encoder.2"),
        (transcribed(), 0, 1, "encoder", "runs once"),
    ):
        with raises_shown(RequestError, reported):
            capture_layer(llm, prompt, layer, step, half=half)
    write_tiny(tmp_path / "tiny")
    with pytest.raises(RequestError, match="no encoder whose layers"):
        capture_layer(LLM(tmp_path / "tiny", "cpu", max_batch_size=1), IDS, 0, half="encoder")


def test_bundles_that_do_not_fit_together(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    write_bundle(path, capture_layer(llm, transcribed(), 1))
    with safe_open(path, framework="pt") as file:
        reported = json.loads(file.metadata()["ingot_repro"])
    tensors = load_file(path)
    encoded = tensors["input.encoded"]
    changes: tuple[tuple[dict[str, Any], dict[str, torch.Tensor]], ...] = (
        ({"half": "front"}, tensors),
        ({"half": "encoder"}, tensors),
        ({}, {name: one for name, one in tensors.items() if name != "input.encoded"}),
        ({}, tensors | {"input.encoded": encoded[:, :5].clone()}),
        ({}, tensors | {"input.encoded": encoded.repeat(2, 1)}),
    )
    for facts, own in changes:
        save_file(own, path, {"ingot_repro": json.dumps(reported | facts)})
        with pytest.raises(EngineError, match="damaged"):
            read_bundle(path)


# --- the verb ----------------------------------------------------------------------------------------------


def test_the_verb(tiny_engine: Path, clips: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    usual = ("--audio", clips[0], "--ids", "1 5 9", "--device", "cpu")
    for layer, tokens in (("1", "5: the prompt and 2 decode steps"), ("encoder.1", "40")):
        step = ("--step", 2) if layer == "1" else ()
        shown = ingot("repro", tiny_engine, "--layer", layer, *usual, *step)
        assert shown.exit_code == 0, shown.output
        assert tokens in shown.stdout
        assert "as you would share the recording" in " ".join(shown.stderr.split())
        target = tmp_path / f"{tiny_engine.name}-layer{layer}.safetensors"
        again = ingot("repro", "--run", target, "--device", "cpu")
        assert again.exit_code == 0
        assert f"{layer.replace('encoder.', 'encoder.layers.')} of {tiny_engine.name}" in again.stdout
    assert str(clips[0]) not in target.read_bytes().decode("latin1")


def test_the_verb_begins_a_transcript(whisper: Path, clips: list[Path], tmp_path: Path) -> None:
    usual = ("repro", whisper, "--layer", 0, "--device", "cpu", "--out", tmp_path / "b", "--json")
    begun = ingot(*usual, "--audio", clips[0], "--language", "de")
    assert begun.exit_code == 0, begun.output
    assert json.loads(begun.stdout)["counts"] == [4]
    (tmp_path / "b").unlink()
    said = ingot(*usual, "--audio", clips[0], "--prompt", "400 500")
    assert json.loads(said.stdout)["counts"] == [6]


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--layer", "0", "--ids", "1 5"), "the prompt has no recording"),
        (("--layer", "encoder.x", "--audio", "CLIP", "--ids", "1"), "it takes N or encoder.N"),
        (("--layer", ".1", "--audio", "CLIP", "--ids", "1"), "it takes N or encoder.N"),
        (("--layer", "0", "--ids", "1", "--language", "de"), "it is of --audio"),
        (("--layer", "0", "--audio", "CLIP", "--messages", "m.json"), "--audio goes with --prompt"),
        (("--layer", "0", "--audio", "CLIP", "--ids", "1", "--language", "de"), "--audio goes with --prompt"),
        (("--layer", "0", "--audio", "absent.wav", "--ids", "1"), "no such file"),
        (("--run", "b.safetensors", "--audio", "CLIP"), "leave out"),
    ],
)
def test_what_is_misused(words: tuple[str, ...], reported: str, tiny_engine: Path, clips: list[Path]) -> None:
    engine = () if words[0] == "--run" else (tiny_engine,)
    real = [str(clips[0]) if word == "CLIP" else word for word in words]
    shown = ingot("repro", *engine, *real, "--device", "cpu")
    assert shown.exit_code == 2, shown.output
    assert reported in " ".join(shown.stderr.replace("│", " ").split())


def test_a_recording_for_an_engine_of_text(clips: list[Path], tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    words = ("--layer", "0", "--audio", clips[0], "--ids", "1", "--device", "cpu", "--max-batch-size", "1")
    shown = ingot("repro", tmp_path / "tiny", *words)
    assert shown.exit_code == 2
    assert "does not take speech" in " ".join(shown.stderr.split())
