"""``ingot bench transcribe``: clips of speech's lengths, and both sides with the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.errors import ConfigError
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.bench.transcription_speed import LONGEST, MEAN_SECONDS, SHORTEST, TranscriptionBench
from ingot.models.speech_tokens import SpeechTokens
from tests.e2e.terminal import ingot
from tests.speech.conftest import whisper as whisper

WORDS = ("--clips", 3, "--tokens-per-second", 1, "--repeats", 1, "--device", "cpu", "--json")


@pytest.fixture(autouse=True)
def ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = Ceiling(10.0, 0.1, "fp32", 1, 1)
    monkeypatch.setattr(
        "ingot.measure.bench.transcription_speed.measure_ceiling", lambda device, dtype: made_up
    )


def test_lengths_are_those_of_speech() -> None:
    wanted = TranscriptionBench()
    seconds = wanted.seconds()
    assert len(seconds) == 73
    assert sum(seconds) / 73 == pytest.approx(MEAN_SECONDS, rel=0.01)
    assert SHORTEST <= min(seconds) < 2
    assert 25 < max(seconds) <= LONGEST
    assert sorted(seconds)[36] == pytest.approx(6.2, abs=0.3)
    assert seconds != sorted(seconds)
    assert seconds == TranscriptionBench().seconds()
    assert (
        sorted(seconds)
        == sorted(TranscriptionBench(seed=1).seconds())
        != TranscriptionBench(seed=1).seconds()
    )
    assert [len(one) / 16000 for one in wanted.samples()] == pytest.approx(seconds, abs=1e-4)
    tokens = SpeechTokens.of_vocabulary(51865)
    asked = wanted.asked(tokens)
    assert [one.max_new_tokens for one in asked] == [round(4 * one) for one in seconds]
    assert tokens.end in (asked[0].suppress or ())


def test_both_sides(whisper: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    found = ingot(
        "bench", "transcribe", whisper, "--batch", "1,2", "--against", "hf", "--json-file", file, *WORDS
    )
    assert found.exit_code == 0, found.stderr
    record = json.loads(found.stdout)
    assert json.loads(file.read_text()) == record
    assert record["verb"] == "transcribe"
    assert "LibriSpeech" in record["wanted"]["lengths"]
    assert "fixed number of tokens" in record["method"]
    audio = sum(record["wanted"]["seconds"])
    for side in record["sides"]:
        one, two = side["results"]
        assert one["tokens"] == two["tokens"] == sum(round(s) for s in record["wanted"]["seconds"])
        assert one["rtfx"] == pytest.approx(audio / one["seconds"]["p50"], rel=0.01)
        assert 0 < one["clip_ms"]["p50"] <= one["clip_ms"]["p90"]
        assert two["clip_ms"] is None
    first = record["ratios"][0]
    assert first["batch"] == 1
    ours, theirs = (side["results"][0]["seconds"]["p50"] for side in record["sides"])
    assert first["seconds"] == pytest.approx(theirs / ours, rel=0.01)


def test_random_weights_and_tables(whisper: Path) -> None:
    words = ("bench", "transcribe", "--random-weights", whisper / "config.json", "--batch", "2")
    found = ingot(*words, *WORDS[:-1])
    assert found.exit_code == 0, found.stderr
    assert "3 clips" in found.stdout
    assert "RTFx" in found.stdout


def test_what_it_refuses(checkpoint: Path) -> None:
    found = ingot("bench", "transcribe", checkpoint, *WORDS)
    assert found.exit_code == 2
    assert "this engine does not take speech" in found.stderr
    assert ingot("bench", "transcribe", *WORDS).exit_code == 2
    assert ingot("bench", "transcribe", checkpoint, "--clips", "0").exit_code == 2
    for rate in (0.0, 20.0):
        with pytest.raises(ConfigError, match="tokens_per_second"):
            TranscriptionBench(tokens_per_second=rate)
