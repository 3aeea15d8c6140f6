"""Whisper whose values or scales speech chose: proven, aligned, nearer than rounding, in the right layers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from ingot import LLM, Input, Prompt, build
from ingot.audio.log_mel import HOP, log_mel
from ingot.audio.recording_samples import read_audio
from ingot.building.calibration import input_statistics
from ingot.building.calibration.calibrate import CalibratedLayer, Walk
from ingot.building.calibration.rescaling import fold, rescaling_sites
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.config.quantization.rptq_options import RptqConfig
from ingot.engine.manifest import Manifest
from ingot.layers.decoder import Decoder
from ingot.layers.encoder_pass import EncoderPass
from ingot.layers.linear import linears
from ingot.measure.align.align_session import align
from ingot.proof.verify_engine import verify
from tests.audio_files import swelling_noise
from tests.e2e.terminal import ingot
from tests.encoders.speech import FRAMES, LAYERS, MELS, write_speech
from tests.quant.models import CPU, divergence, opened
from tests.quant.test_walk import Kept
from tests.tiny_models import random_ids

SAMPLES, UNSEEN = 8, 4
SCHEMES = {
    "gptq": QuantConfig("w4a16", 32, method="gptq"),
    "awq": QuantConfig("w4a16", 32, method="awq"),
    "smoothquant": QuantConfig("w8a8", method="smoothquant"),
    "static": QuantConfig("w8a8", activations="static"),
    "static, searched": QuantConfig("w8a8", method="smoothquant", activations="static", alpha="search"),
    "w4a8 by gptq": QuantConfig("w4a8", 64, rotation=False, method="gptq"),
    "rptq-w8a8": QuantConfig("rptq-w8a8", 32, rptq=RptqConfig(ranges="minmax")),
    "rptq-w4a8": QuantConfig("rptq-w4a8", 32),
    "apart": read_quant("encoder=w8a8,decoder=w4a16", group=32, method="gptq"),
    "encoder alone": read_quant("encoder=w8a8", activations="static"),
    "decoder alone": read_quant("decoder=w4a16", group=32, method="awq"),
}
NEARER = {"gptq": 0.5, "awq": 0.7, "w4a8 by gptq": 0.5, "smoothquant": 1.0, "decoder alone": 0.9}


def write_clip(path: Path, seed: int, frames: int = FRAMES) -> Path:
    """A recording of noise whose loudness swells."""
    soundfile.write(path, swelling_noise(frames * HOP, seed, 3 + seed % SAMPLES), 16000)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    write_speech(folder)
    return folder


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of one window, with what the decoder reads beside each."""
    folder = tmp_path_factory.mktemp("spoken")
    records = [
        {"audio": write_clip(folder / f"{n}.wav", n).name, "token_ids": random_ids(40, seed=n)}
        for n in range(SAMPLES)
    ]
    path = folder / "spoken.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """Other windows of the same kind."""
    folder = tmp_path_factory.mktemp("unseen")
    clips = [write_clip(folder / f"{n}.wav", n) for n in range(20, 20 + UNSEEN)]
    features = [log_mel(read_audio(clip), MELS) for clip in clips]
    return [Prompt([Input(one), random_ids(40, seed=20 + n)]) for n, one in enumerate(features)]


def logits(llm: LLM, prompts: list[Prompt]) -> torch.Tensor:
    return torch.cat([llm.logits(prompt) for prompt in prompts]).log_softmax(-1)


def built(checkpoint: Path, manifest: Path, engine: Path, quant: QuantConfig, **options: Any) -> Path:
    given = {"device": "cpu", "dtype": "fp32", "proof": False} | options
    return build(checkpoint, engine, quant=quant, calib=manifest, **given)


@pytest.fixture(scope="module")
def engine_of(
    checkpoint: Path, manifest: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """engine_of("gptq"): an engine of ``SCHEMES`` with its proof, built once; no test changes it."""
    root = tmp_path_factory.mktemp("engines")

    @functools.cache
    def made(name: str) -> Path:
        return built(checkpoint, manifest, root / name, SCHEMES[name], proof=True)

    return made


@pytest.fixture(scope="module")
def exact(checkpoint: Path, unseen: list[Prompt]) -> torch.Tensor:
    return logits(LLM(checkpoint, "cpu"), unseen)


@torch.inference_mode()
def _encoded(model: Decoder, prompt: Prompt) -> list[torch.Tensor]:
    """Outputs of a prompt's input, by the encoder's modules and by fused kernels."""
    features = next(part for part in prompt.parts if isinstance(part, Input)).features
    return [model.encode(features, EncoderPass(fused=fused)) for fused in (False, True)]


@pytest.mark.stays("gptq", "rptq-w4a8", "apart")
@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_proven_and_near(
    checkpoint: Path,
    unseen: list[Prompt],
    exact: torch.Tensor,
    engine_of: Callable[[str], Path],
    name: str,
) -> None:
    quant, engine = SCHEMES[name], engine_of(name)
    assert verify(engine, "cpu", note=False).verdict == "proven"
    llm = LLM(engine, "cpu")
    by_module, fused = _encoded(llm.engine.model, unseen[0])
    assert float((fused - by_module).norm() / by_module.norm()) < 1e-3
    cost = divergence(exact, logits(llm, unseen))
    assert 1e-6 < cost < (0.02 if "w4" in quant.label else 1e-3)
    if name in NEARER:
        plain = quant.replace(method="round", alpha=None)
        rounded = divergence(exact, logits(LLM(checkpoint, "cpu", quant=plain), unseen))
        assert cost < NEARER[name] * rounded


@pytest.mark.stays("awq", "apart")
@pytest.mark.parametrize("name", ["gptq", "awq", "static, searched", "rptq-w8a8", "apart"])
def test_it_is_aligned(checkpoint: Path, name: str, engine_of: Callable[[str], Path]) -> None:
    """Hugging Face's class computes the same with the engine's weights, norms and biases."""
    report = align(engine_of(name), checkpoint, [[1, 5, 9, 30]], steps=1, device="cpu")
    assert report.aligned, report.first_stage


def test_only_the_half_that_was_asked_for_changes(
    checkpoint: Path, tmp_path: Path, engine_of: Callable[[str], Path]
) -> None:
    plain = Manifest.read(build(checkpoint, tmp_path / "plain", device="cpu", dtype="fp32", proof=False))
    for name, half in (("encoder alone", True), ("decoder alone", False)):
        engine = Manifest.read(engine_of(name))
        changed = {n for n, entry in engine.tensors.items() if plain.tensors.get(n) != entry}
        assert changed
        assert {n.startswith("encoder.") for n in changed} == {half}


def test_what_is_rescaled_in_either_half(checkpoint: Path, manifest: Path, tmp_path: Path) -> None:
    """Norms before products that are smoothed, but not the one that all cross-attentions read."""
    quant = QuantConfig("w8a8", method="smoothquant", layers={"*.mlp.*": "none"})
    smooth = Manifest.read(built(checkpoint, manifest, tmp_path / "smooth", quant)).tensors
    plain = Manifest.read(
        build(checkpoint, tmp_path / "plain", device="cpu", dtype="fp32", proof=False)
    ).tensors
    moved = {n for n, entry in smooth.items() if "norm" in n and plain[n] != entry}
    wanted = {f"encoder.layers.{i}.input_layernorm" for i in range(LAYERS)}
    wanted |= {
        f"layers.{i}.{n}" for i in range(LAYERS) for n in ("input_layernorm", "encoder_attn_layernorm")
    }
    assert {n.rpartition(".")[0] for n in moved} == wanted


@pytest.fixture
def walked(checkpoint: Path) -> tuple[Walk[Kept], list[list[int]], list[torch.Tensor]]:
    decoder, load = opened(checkpoint)
    ids = [random_ids(n, seed=n) for n in (9, 30, 1)]
    features = [torch.randn(MELS, FRAMES, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    return Walk(decoder, load, ids, CPU, Kept, features=features, batch_tokens=32), ids, features


@torch.no_grad()
def test_inputs_are_those_of_huggingface(
    tmp_path: Path, checkpoint: Path, walked: tuple[Walk[Kept], list[list[int]], list[torch.Tensor]]
) -> None:
    """Of every product of encoder, decoder and cross-attention, over all samples in order."""
    walk, ids, features = walked
    model = write_speech(tmp_path)
    theirs: dict[str, list[torch.Tensor]] = {}
    leaves = {"qkv_proj": "q_proj", "kv_proj": "k_proj", "q_proj": "q_proj", "o_proj": "out_proj"}
    leaves |= {"up_proj": "fc1", "down_proj": "fc2"}
    seen: dict[str, torch.Tensor] = {}
    for name in walk.layers:
        layer = walk.observe(name)
        seen |= {one: kept.x for one, kept in layer.inputs.items()}
        walk.advance(layer)
    for name in seen:
        path = name if name.startswith("encoder.") else f"decoder.{name}"
        path, _, leaf = path.replace("mlp.", "").rpartition(".")
        module = model.model.get_submodule(f"{path}.{leaves[leaf]}")
        rows = theirs.setdefault(name, [])
        module.register_forward_pre_hook(lambda m, args, rows=rows: rows.append(args[0][0]))
    for own, transcribed in zip(ids, features, strict=True):
        model(transcribed[None], decoder_input_ids=torch.tensor([own]))
    assert len(seen) == LAYERS * (4 + 7)
    for name, x in seen.items():
        torch.testing.assert_close(x, torch.cat(theirs[name]), rtol=1e-4, atol=1e-4)


def test_factors_at_every_site_change_no_output(
    checkpoint: Path, walked: tuple[Walk[Kept], list[list[int]], list[torch.Tensor]]
) -> None:
    """Random ones in every layer of both halves: each layer gives the next what it gave before."""
    decoder, load = opened(checkpoint)
    _, ids, features = walked
    generator = torch.Generator().manual_seed(1)

    def last(propagate: bool) -> torch.Tensor:
        walk = Walk(decoder, load, ids, CPU, Kept, features=features, propagate=propagate)
        for name in walk.layers:
            layer = walk.observe(name)
            for site in rescaling_sites(decoder.config, name) if propagate else ():
                size = layer.weight(f"{site.reader}.weight").shape[1]
                fold(site, torch.exp(torch.randn(size, generator=generator)), layer)
            walk.advance(layer)
        found: CalibratedLayer[Kept] = layer
        return found.inputs[f"{walk.layers[-1]}.self_attn.qkv_proj"].x

    exact = last(propagate=False)
    torch.testing.assert_close(last(propagate=True), exact, rtol=1e-4, atol=1e-4)
    names = [len(rescaling_sites(decoder.config, name)) for name in ("encoder.layers.0", "layers.0")]
    assert names == [3, 5]


def test_ranges_are_read_again_where_no_recording_changed(
    checkpoint: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for file in manifest.parent.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    given = {"engine": tmp_path / "engine", "quant": SCHEMES["static"], "force": True}
    first = built(checkpoint, own / manifest.name, **given) / "weights.safetensors"
    bytes_of = first.read_bytes()
    walk = input_statistics.Walk
    monkeypatch.setattr(input_statistics, "Walk", None)
    assert (built(checkpoint, own / manifest.name, **given) / first.name).read_bytes() == bytes_of
    monkeypatch.setattr(input_statistics, "Walk", walk)
    write_clip(own / "0.wav", 99)
    assert (built(checkpoint, own / manifest.name, **given) / first.name).read_bytes() != bytes_of


def test_the_verb(checkpoint: Path, manifest: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    flags = ("--quant", "encoder=w8a8,decoder=w4a16", "--group-size", 32, "--method", "gptq")
    done = ingot(
        "build", checkpoint, "-o", engine, *flags, "--calib", manifest, "--no-proof", "--dtype", "fp16"
    )
    assert done.exit_code == 0, done.output
    assert f"{SAMPLES} samples, {40 * SAMPLES} tokens" in ingot("inspect", engine).output
    own = linears(LLM(engine, "cpu").engine.model)
    assert {m.scheme.name for n, m in own.items() if n.startswith("encoder.")} == {"w8a8"}
    assert {m.scheme.name for n, m in own.items() if n.startswith("layers.")} == {"w4a16"}


@pytest.mark.stays("gptq-encoder=fp32,decoder=bf16", "smoothquant-encoder=bf16")
@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("awq", "encoder=fp16,decoder=fp32"),
        ("gptq", "encoder=fp32,decoder=bf16"),
        ("smoothquant", "encoder=bf16"),
    ],
)
def test_halves_of_two_dtypes(
    checkpoint: Path, manifest: Path, tmp_path: Path, name: str, dtypes: str
) -> None:
    """Scales and what is not linear are in their half's, and are compared with the checkpoint's so."""
    engine = built(checkpoint, manifest, tmp_path / "engine", SCHEMES[name], dtype=dtypes, proof=True)
    assert verify(engine, "cpu", note=False).verdict == "proven"
    asked = dict(part.split("=") for part in dtypes.split(","))
    stored = {"fp16": "F16", "bf16": "BF16", "fp32": "F32"}
    for tensor, entry in Manifest.read(engine).tensors.items():
        half = "encoder" if tensor.startswith("encoder.") else "decoder"
        if tensor.endswith("bias") or (tensor.endswith("scales") and name != "smoothquant"):
            assert entry.dtype == stored[asked.get(half, "fp32")], tensor
