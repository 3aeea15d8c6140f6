"""``ingot doctor`` on a model that hears: what layers of each half cost, and mixes that build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import build
from ingot.audio.log_mel import fit, log_mel
from ingot.audio.recording_samples import read_audio
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.doctor import Diagnosis, Wanted, doctor
from ingot.measure.evaluate.doctor.scheme_patterns import mixed
from ingot.measure.evaluate.token_divergence import kl_rows
from ingot.speech.transcriber import Transcriber
from tests.e2e.terminal import ingot
from tests.encoders.speech import write_multilingual

SAID = ([400, 500, 600], [700, 800])
USUAL = ("--quant", "w4a16", "--group-size", "32", "--budget", "kl_mean=1", "--device", "cpu")
LOUD = [3, 17]
PLANTED = {  # the layer that is named → what gives next to nothing there, products that read it
    "encoder.layers.1.mlp.up_proj": ("encoder.layers.1.final_layer_norm", ("encoder.layers.1.fc1",)),
    "layers.1.encoder_attn.o_proj": (
        "decoder.layers.1.encoder_attn.v_proj",
        ("decoder.layers.1.encoder_attn.out_proj",),
    ),
    "layers.0.encoder_attn.kv_proj": (
        "encoder.layer_norm",
        ("decoder.layers.0.encoder_attn.k_proj", "decoder.layers.0.encoder_attn.v_proj"),
    ),
}


def write_short(folder: Path) -> Path:
    """As ``write_multilingual``, but it hears two seconds."""
    return write_multilingual(folder, 3, max_source_positions=100)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short(tmp_path_factory.mktemp("short-whisper"))


@pytest.fixture(scope="module")
def manifest(clips: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("said") / "manifest.jsonl"
    records = [
        {"audio": str(clip), "text": " ".join(map(str, ids)), "language": "de"}
        for clip, ids in zip(clips, SAID, strict=False)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def diagnosed(checkpoint: Path, manifest: Path, budget: float = 10.0, limit: int | None = None) -> Diagnosis:
    wanted = Wanted(str(checkpoint), QuantConfig("w4a16", 32), budget, device="cpu")
    return doctor(wanted, read_data(manifest, limit=limit))


@pytest.fixture(scope="module")
def found(whisper: Path, manifest: Path) -> Diagnosis:
    return diagnosed(whisper, manifest)


def kl_of(checkpoint: Path, quant: QuantConfig, clips: list[Path]) -> float:
    """Mean KL of the next token with these schemes, by the runtime, teacher-forced."""
    return kl_between(
        [Transcriber(checkpoint, "cpu", quant=one, max_batch_size=1) for one in (QuantConfig(), quant)], clips
    )


def kl_between(sides: list[Transcriber], clips: list[Path]) -> float:
    prompt = sides[0].vocabulary.tokens.prompt("de", "transcribe", timestamps=False)
    parts = []
    for clip, ids in zip(clips, SAID, strict=False):
        samples = read_audio(clip)
        sounding = len(samples) // 160
        features = fit(log_mel(fit(samples, len(samples) + 480_000), 80)[:, :sounding], 200)
        logs = [side.logits(features, [*prompt, *ids]).double().log_softmax(-1) for side in sides]
        parts.append(kl_rows(*(one[len(prompt) - 1 :] for one in logs)))
    return float(torch.cat(parts).mean())


@pytest.mark.stays("encoder.layers.1.mlp.down_proj", "layers.1.encoder_attn.o_proj")
@pytest.mark.parametrize(
    "name",
    [
        "encoder.layers.0.self_attn.qkv_proj",
        "encoder.layers.1.mlp.down_proj",
        "layers.0.encoder_attn.kv_proj",
        "layers.1.encoder_attn.o_proj",
        "layers.0.mlp.up_proj",
    ],
)
def test_a_layer_alone_costs_what_a_model_with_it_costs(
    name: str, found: Diagnosis, whisper: Path, clips: list[Path]
) -> None:
    (layer,) = (one for one in found.layers if one.name == name)
    other = kl_of(whisper, QuantConfig(group=32, layers={name: "w4a16"}), clips)
    assert layer.kl["w4a16"] == pytest.approx(other, rel=2e-2, abs=1e-12)
    assert other > layer.kl["w8a16"] > 0


def test_both_halves_at_once(found: Diagnosis, whisper: Path, clips: list[Path]) -> None:
    assert len(found.layers) == 2 * 4 + 2 * 7
    assert found.facts["counts"]["counted_tokens"] == sum(len(ids) + 1 for ids in SAID)
    whole = kl_of(whisper, QuantConfig("w4a16", 32), clips)
    assert found.uniform["w4a16"].measured == pytest.approx(whole, rel=2e-2)


@pytest.mark.stays("encoder.layers.1.mlp.up_proj")
@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_layer_is_the_most_sensitive(
    name: str, found: Diagnosis, whisper: Path, manifest: Path, tmp_path: Path
) -> None:
    quiet, products = PLANTED[name]
    write_short(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for kind in ("weight", "bias"):
        tensors[f"model.{quiet}.{kind}"][LOUD] *= 1e-5
    for product in products:
        tensors[f"model.{product}.weight"][:, LOUD] = 60.0
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    planted = diagnosed(tmp_path, manifest, limit=1)
    assert max(planted.layers, key=lambda layer: layer.kl["w4a16"]).name == name
    assert max(found.layers, key=lambda layer: layer.kl["w4a16"]).name != name


def test_the_mix_builds(found: Diagnosis, whisper: Path, manifest: Path, tmp_path: Path) -> None:
    budget = 0.3 * found.uniform["w4a16"].measured
    out, reported = tmp_path / "mixed.yaml", tmp_path / "found.json"
    words = (
        "--data",
        manifest,
        *USUAL,
        "--budget",
        f"kl_mean={budget}",
        "--out",
        out,
        "--json-file",
        reported,
    )
    shown = ingot("doctor", whisper, *words)
    assert shown.exit_code == 0, shown.output
    for text in ("summed by layer", "encoder.layers.0", "encoder_attn.kv_proj", "encoder.qkv_proj"):
        assert text in shown.stdout
    record = json.loads(reported.read_text())
    assert set(record["encoder_layers"]) == {"encoder.layers.0", "encoder.layers.1"}
    assert set(record["decoder_layers"]) == {"layers.0", "layers.1"}
    assert record["chosen"]["kl_measured"] <= budget
    schemes = {layer["name"]: layer["scheme"] for layer in record["layers"]}
    quant = read_quant(str(out))
    assert {name: quant.at(name).scheme for name in schemes} == schemes
    assert "2 texts, 7 tokens counted" in out.read_text()
    engine = tmp_path / "engine"
    assert ingot("build", whisper, "-o", engine, "--quant", out, "--device", "cpu").exit_code == 0


def test_a_half_is_one_pattern() -> None:
    parts = ("self_attn.qkv_proj", "mlp.up_proj", "mlp.down_proj")
    names = [f"{half}layers.{i}.{part}" for half in ("encoder.", "") for i in range(4) for part in parts]
    schemes = {name: "w8a16" if name.startswith("encoder.") else "w4a16" for name in names}
    schemes |= {name: "none" for name in names if name.startswith("layers.") and name.endswith("down_proj")}
    found = mixed(schemes, QuantConfig("w4a16"))
    assert (found.scheme, found.layers) == (
        "w8a16",
        {"layers.*": "w4a16", "layers.*.mlp.down_proj": "none"},
    )


@pytest.mark.parametrize(
    ("record", "reported"),
    [
        ({"text": "5 9"}, "no audio with its text"),
        ({"audio": "CLIP", "text": "5 9"}, "does not say its language"),
        ({"audio": "CLIP", "text": "five", "language": "de"}, "there is no tokenizer for a text"),
        ({"audio": "CLIP", "text": "99999", "language": "de"}, "a token id outside the vocabulary"),
        ({"audio": "CLIP", "text": "5 " * 448, "language": "de"}, "longer than the model's context"),
        ({"audio": "LONG", "text": "5 9", "language": "de"}, "the recording takes 3.0 s, a window 2 s"),
    ],
)
def test_recordings_that_do_not_serve(
    record: dict[str, str], reported: str, whisper: Path, clips: list[Path], tmp_path: Path
) -> None:
    import soundfile

    soundfile.write(tmp_path / "LONG", torch.zeros(3 * 16000).numpy(), 16000, format="WAV")
    (tmp_path / "CLIP").write_bytes(clips[0].read_bytes())
    data = tmp_path / "manifest.jsonl"
    data.write_text(json.dumps(record) + "\n")
    shown = ingot("doctor", whisper, "--data", data, *USUAL, "--out", tmp_path / "mixed.yaml")
    assert shown.exit_code == 2, shown.output
    assert reported in " ".join(shown.stderr.split())
    assert not (tmp_path / "mixed.yaml").exists()


def test_windows_are_refused(whisper: Path, manifest: Path) -> None:
    words = ("doctor", whisper, "--data", manifest, *USUAL, "--window", "64")
    shown = ingot(*words)
    assert shown.exit_code == 2
    assert "a transcript is read whole" in shown.stderr
    with pytest.raises(ConfigError, match="starts from one scheme"):
        doctor(Wanted(str(whisper), read_quant("encoder=w8a16"), 1.0), read_data(manifest))


@pytest.fixture(scope="module")
def calib(clips: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calib") / "calib.jsonl"
    records = [{"audio": str(clip), "token_ids": [3, *ids]} for clip, ids in zip(clips, SAID, strict=False)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def in_blocks(whisper: Path, manifest: Path, calib: Path) -> Diagnosis:
    wanted = Wanted(str(whisper), QuantConfig("rptq-w4a4", 32), 10.0, device="cpu", calib=calib)
    return doctor(wanted, read_data(manifest))


@pytest.mark.parametrize(
    "name",
    ["encoder.layers.1.self_attn.o_proj", "layers.0.encoder_attn.q_proj", "layers.1.mlp.down_proj"],
)
def test_rptq_of_each_half(
    name: str, in_blocks: Diagnosis, whisper: Path, calib: Path, clips: list[Path], tmp_path: Path
) -> None:
    """Recordings calibrate both; a layer alone costs what an engine costs that has it alone in blocks."""
    (layer,) = (one for one in in_blocks.layers if one.name == name)
    quant = QuantConfig("none", 32, layers={name: "rptq-w4a4"})
    engine = build(
        whisper, tmp_path / "engine", quant=quant, calib=calib, device="cpu", proof=False, dtype="fp32"
    )
    sides = [Transcriber(one, "cpu", max_batch_size=1) for one in (whisper, engine)]
    assert layer.kl["rptq-w4a4"] == pytest.approx(kl_between(sides, clips), rel=2e-2)
