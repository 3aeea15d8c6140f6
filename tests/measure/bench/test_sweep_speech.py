"""``ingot sweep`` of a model that hears: clips by precision and batch, both halves apart, with their WER."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.measure.sweep import _schemes
from ingot.errors import ConfigError, RequestError
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.bench.latency import Latency
from ingot.measure.bench.sweep import sweep_session as sweeps
from ingot.measure.bench.sweep.sweep_line import measure_line
from ingot.measure.bench.sweep.sweep_record import best
from ingot.measure.bench.sweep.sweep_session import Sweep, run_sweep
from ingot.measure.bench.transcription_speed import TranscriptionBench
from ingot.measure.side.side_spec import SideSpec
from tests.e2e.terminal import ingot
from tests.speech.conftest import clips as clips
from tests.speech.conftest import whisper as whisper

HALVES = "encoder=w8a16,decoder=w4a16"
SMALL = ("--clips", 2, "--tokens-per-second", 1, "--repeats", 1, "--device", "cpu", "--no-png")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = Ceiling(10.0, 0.1, "fp32", 1, 1)
    monkeypatch.setattr("ingot.measure.bench.sweep.sweep_line.measure_ceiling", lambda device, dtype: made_up)
    monkeypatch.setattr(sweeps, "run_sweep", partial(run_sweep, measure=measure_line))


def test_both_halves_with_their_wer(whisper: Path, clips: list[Path], tmp_path: Path) -> None:
    out, manifest = tmp_path / "new", tmp_path / "manifest.jsonl"
    manifest.write_text(json.dumps({"audio": str(clips[0]), "text": "5 9 31", "language": "de"}) + "\n")
    words = ("sweep", whisper, "--quant", f"none,{HALVES}", "--data", manifest, "--out", out, *SMALL)
    shown = ingot(*words, "--batch", "1,2")
    assert shown.exit_code == 0, shown.stderr
    record = json.loads((out / "sweep.json").read_text())
    assert "tokens per second of audio" in shown.stdout
    assert all(word in shown.stdout for word in ("RTFx", "clip ms", "wer", "Pareto"))
    assert [line["quant"] for line in record["lines"]] == ["none", HALVES]
    assert record["settings"]["clips"] == 2
    assert record["settings"]["data"]["metric"] == "wer"
    assert "swells" in record["method"]
    dense, narrow = record["lines"]
    for line in (dense, narrow):
        assert [point["batch"] for point in line["points"]] == [1, 2]
        assert line["quality"]["wer"] > 0
        one, two = (point["memory"] for point in line["points"])
        assert two["cache_gb"] == pytest.approx(2 * one["cache_gb"], rel=1e-3)
        assert all(point["figures"]["rtfx"] > 0 for point in line["points"])
    assert narrow["points"][0]["facts"]["quantization"] == "w4a16+w8a16"
    assert narrow["points"][0]["memory"]["weights_gb"] < dense["points"][0]["memory"]["weights_gb"]
    assert record["pareto"]["against"] == "wer"
    page = (out / "sweep.html").read_text()
    assert "seconds of audio/s" in page
    before = (out / "points.jsonl").read_text()
    assert ingot(*words, "--batch", "1,2").exit_code == 0
    assert (out / "points.jsonl").read_text() == before
    other = ingot(*words, "--batch", "1", "--tokens-per-second", "2")
    assert "tokens_per_second 1.0, now 2.0" in " ".join(other.stderr.split())


def test_hugging_face_is_a_line(whisper: Path, tmp_path: Path) -> None:
    spec = SideSpec(path=str(whisper), device="cpu")
    shape = TranscriptionBench(clips=1, tokens_per_second=0.5, repeats=1)
    record = run_sweep(Sweep(spec, shape=shape, against="hf"), tmp_path, measure=measure_line)
    ours, theirs = record["lines"]
    assert theirs["name"] == "Hugging Face fp32"
    one, two = ours["points"][0], theirs["points"][0]
    assert one["memory"]["weights_gb"] == pytest.approx(two["memory"]["weights_gb"], rel=0.01)
    assert two["memory"]["cache_gb"] == pytest.approx(2 * (448 + 1500) * 2 * 32 * 4 / 1e9, rel=1e-3)
    assert one["figures"]["tokens"] == two["figures"]["tokens"]


def test_the_fastest_point_is_of_audio() -> None:
    def line(name: str, wer: float, *speeds: float) -> dict[str, Any]:
        points = [{"batch": batch, "figures": {"rtfx": rtfx}} for batch, rtfx in enumerate(speeds, start=1)]
        return {"name": name, "quality": {"wer": wer}, "points": points}

    found = best([line("a", 5.0, 10.0, 30.0), line("b", 6.0, 20.0, 25.0), line("c", 4.0, 9.0)])
    assert found == {"against": "wer", "points": [["c", 1], ["a", 2]]}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (HALVES, [HALVES]),
        (f"none,{HALVES},w8a16", ["none", HALVES, "w8a16"]),
        ("decoder=w8a16, encoder=w4a16,decoder=w8a8", ["decoder=w8a16,encoder=w4a16", "decoder=w8a8"]),
        ("encoder=w8a16,encoder=w4a16", ["encoder=w8a16", "encoder=w4a16"]),
    ],
)
def test_halves_that_follow_each_other_are_one_scheme(text: str, found: list[str]) -> None:
    assert list(_schemes(text)) == found


def test_sizes_end_with_the_clips(whisper: Path) -> None:
    spec = SideSpec(path=str(whisper), device="cpu")
    assert Sweep(spec, shape=TranscriptionBench(clips=5)).sizes == (1, 2, 4)
    with pytest.raises(ConfigError, match="more clips than there are"):
        Sweep(spec, batches=(1, 8), shape=TranscriptionBench(clips=5))


def test_what_is_of_the_other_kind(whisper: Path, checkpoint: Path, tmp_path: Path) -> None:
    for model, words, reported in (
        (whisper, ("--prompt-tokens", "8"), "it is about prompts, and this is a speech model"),
        (checkpoint, ("--clips", "8"), "it is about clips, and this model takes text"),
        (whisper, ("--quant", "encoder=w3"), "the parts of a model and their schemes are not named"),
        (whisper, ("--data", whisper / "config.json"), "a .json file must be a list of records"),
    ):
        shown = ingot("sweep", model, "--out", tmp_path / "new", "--no-png", "--device", "cpu", *words)
        assert shown.exit_code == 2, shown.output
        assert reported in " ".join(shown.stderr.replace("│", " ").split())
    with pytest.raises(ConfigError, match="needs a model of text"):
        run_sweep(Sweep(SideSpec(path=str(whisper), device="cpu"), shape=Latency((1,))), tmp_path)
    with pytest.raises(RequestError, match="does not take speech"):
        run_sweep(Sweep(SideSpec(path=str(checkpoint), device="cpu"), shape=TranscriptionBench()), tmp_path)
