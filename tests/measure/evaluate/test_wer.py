"""``ingot eval wer``: error rates, manifests, LibriSpeech's layout, and both sides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jiwer
import pytest

from ingot.building.builder import build
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.scored_transcripts import recording_check
from ingot.measure.evaluate.wer import Wer
from ingot.speech.transcriber import Transcriber
from tests.e2e.terminal import ingot
from tests.encoders.speech import write_multilingual
from tests.speech.conftest import clips as clips
from tests.speech.conftest import whisper as whisper

OPTIONS: dict[str, Any] = {"temperatures": (0.0,), "max_new_tokens": 9}
QUICK = ("--max-new-tokens", "9", "--device", "cpu", "--json")


def test_normalisers_are_the_originals(golden: Path) -> None:
    metric = Wer()
    for name, language in (("english", "en"), ("basic", "de")):
        for case in json.loads((golden / "whisper" / f"{name}_normalizer.json").read_text()):
            assert metric.normalised(case["input"], language) == case[name].strip()
    for case in json.loads((golden / "whisper" / "basic_normalizer.json").read_text()):
        if case["input"].startswith("今"):
            wanted = [letter for letter in case["basic"] if letter.strip()]
            assert metric.normalised(case["input"], "zh").split() == wanted


def test_rates_are_the_librarys(golden: Path) -> None:
    reported = json.loads((golden / "text_metrics" / "wer.json").read_text())
    right, found = ([one[side] for one in reported["pairs"]] for side in ("reference", "hypothesis"))
    assert jiwer.wer(right, found) == pytest.approx(reported["corpus_wer"])
    assert jiwer.cer(right, found) == pytest.approx(reported["corpus_cer"])
    rates = Wer().rates(["one two three four"], ["one too three for five"], ["de"])
    assert (rates.substitutions, rates.deletions, rates.insertions, rates.words) == (2, 0, 1, 4)
    assert rates.wer == 75.0
    assert rates.cer == pytest.approx(100 * 7 / 18)
    assert Wer().rates(["你好"], ["你坏"], ["zh"]).cer == 50
    assert Wer().rates(["a b"], ["a c"], ["de"]).cer == pytest.approx(
        100 / 3
    )  # spaces that are written count
    nothing = Wer().rates(["Hmm."], [""], ["en"])
    assert (nothing.wer, nothing.words) == (None, 0)


@pytest.fixture(scope="module")
def texts(whisper: Path, clips: list[Path]) -> list[str]:
    """What the model says of the recordings."""
    transcriber = Transcriber(whisper, "cpu", max_batch_size=4)
    return [transcriber(clip, language="de", **OPTIONS).text.strip() for clip in clips]


@pytest.fixture
def manifest(texts: list[str], clips: list[Path], tmp_path: Path) -> Path:
    """Of the recordings, with one word that the model does not say."""
    wrong = [texts[0], f"{texts[1]} nothing", texts[2]]
    for clip in clips:
        shutil.copy(clip, tmp_path)
    records = [
        {"audio": clip.name, "text": text, "language": "de"} for clip, text in zip(clips, wrong, strict=True)
    ]
    path = tmp_path / "manifest.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.stays("batch2")
@pytest.mark.parametrize("batch", [(), ("--batch", "1"), ("--batch", "2")])
def test_a_manifest(whisper: Path, manifest: Path, texts: list[str], batch: tuple[str, ...]) -> None:
    rows = manifest.with_name("rows.jsonl")
    found = ingot("eval", "wer", whisper, "--data", manifest, "--items", rows, *QUICK, *batch)
    assert found.exit_code == 0, found.stderr
    record = json.loads(found.stdout)
    (side,) = record["sides"]
    metrics = side["metrics"]
    words = sum(len(text.split()) for text in texts) + 1
    assert (metrics["deletions"], metrics["substitutions"], metrics["insertions"]) == (1, 0, 0)
    assert metrics["words"] == words
    assert metrics["wer"] == pytest.approx(100 / words)
    assert side["audio_seconds"] == record["counts"]["audio_seconds"] == 4.5
    assert side["rtfx"] == pytest.approx(4.5 / side["seconds"], rel=0.01)
    reported = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["ingot"]["text"] for row in reported] == texts
    assert [row["ingot"]["deletions"] for row in reported] == [0, 1, 0]


def test_beside_hugging_face(whisper: Path, manifest: Path) -> None:
    words = ("eval", "wer", whisper, "--data", manifest, "--against", "hf", "--against-batch", "2")
    found = ingot(*words, *QUICK)
    assert found.exit_code == 0, found.stderr
    record = json.loads(found.stdout)
    ours, theirs = record["sides"]
    assert ours["metrics"] == theirs["metrics"]
    assert [delta["delta"] for delta in record["deltas"]] == [0.0, 0.0]
    assert record["agreement"] == {"answers": 3, "same_tokens": 3, "same_text": 3, "different_text": 0}
    assert theirs["rtfx"] > 0


@pytest.mark.slow
def test_another_engine_that_differs(whisper: Path, manifest: Path, tmp_path: Path) -> None:
    other = write_multilingual(tmp_path / "other", 4)
    words = ("eval", "wer", whisper, "--data", manifest, "--against", other)
    found = ingot(*words, *QUICK)
    assert found.exit_code == 1
    record = json.loads(found.stdout)
    assert record["verdict"] == "beyond"
    assert record["agreement"]["different_text"] == len(record["differing"]) == 3
    row = record["differing"][1]
    assert row["ingot"]["text"] != row["against"]["text"]
    shown = ingot(*words, "--max-delta", "100000", *QUICK[:-1])
    assert shown.exit_code == 0
    assert "0 of 3 transcripts are the same" in shown.stdout
    assert "transcripts that differ" in shown.stdout


def test_librispeech(whisper: Path, clips: list[Path], tmp_path: Path) -> None:
    import soundfile

    chapter = tmp_path / "test-clean" / "61" / "70968"
    chapter.mkdir(parents=True)
    lines = []
    for number, clip in enumerate(clips[:2]):
        samples, rate = soundfile.read(clip)
        soundfile.write(chapter / f"61-70968-{number:04}.flac", samples, rate)
        lines.append(f"61-70968-{number:04} HE BEGAN A CONFUSED COMPLAINT\n")
    (chapter / "61-70968.trans.txt").write_text("".join(lines))
    data = read_data(tmp_path)
    assert [(item.id, item.language) for item in data.items] == [
        ("61-70968-0000", "en"), ("61-70968-0001", "en"),
    ]  # fmt: skip
    found = ingot("eval", "wer", whisper, "--data", tmp_path, *QUICK)
    assert found.exit_code == 0, found.stderr
    record = json.loads(found.stdout)
    assert record["counts"] == {"recordings": 2, "audio_seconds": 2.5}
    assert record["sides"][0]["metrics"]["words"] == 10
    digest = record["data"]["sha256"]
    (chapter / "61-70968.trans.txt").write_text("".join(lines[:1]))
    assert read_data(tmp_path).facts()["sha256"] != digest


def test_what_a_manifest_may_not_say(whisper: Path, clips: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_text("no audio")
    good = {"audio": str(clips[0]), "text": "yes"}
    records: list[dict[str, Any]] = [
        good,
        {"text": "alone"},
        {"audio": "none.wav", "text": "a"},
        {"audio": "broken.wav", "text": "a"},
    ]
    records += [{"audio": 3, "text": "a"}]
    path = tmp_path / "manifest.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ConfigError) as raised:
        read_data(path, needs=recording_check(tmp_path))
    reported = str(raised.value)
    for line in (
        "line 2: no audio",
        "line 3: there is no such",
        "line 4: no audio that",
        "line 5: audio is int",
    ):
        assert line in reported
    assert len(read_data(path, needs=recording_check(tmp_path), skip_bad=True).items) == 1
    small = build(whisper, tmp_path / "small", max_batch_size=2, device="cpu", proof=False)
    refused = ingot("eval", "wer", small, "--data", path, "--skip-bad", "--batch", "3", *QUICK)
    assert (refused.exit_code, "fix: --batch, or build with" in refused.stderr) == (2, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    found = ingot("eval", "wer", whisper, "--data", empty, *QUICK)
    assert (found.exit_code, "the folder has no transcripts" in found.stderr) == (2, True)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"jiwer and whisper-normalizer is not installed.*\[eval\]"):
        Wer()
