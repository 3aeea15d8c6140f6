"""Hugging Face's class, asked as Ingot is, hears the same: alone, in batches, and behind 30 seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.audio.recording_samples import read_audio
from ingot.errors import RequestError
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec
from ingot.measure.side.transcribers import SideTranscript, open_speech_side
from ingot.speech.speech_options import TranscribeOptions
from tests.e2e.terminal import ingot
from tests.support.shown_errors import raises_shown


@pytest.fixture(scope="module")
def recordings(clips: list[Path]) -> list[torch.Tensor]:
    samples = [read_audio(clip) for clip in clips]
    long = torch.cat([torch.cat(samples)] * 8)  # 36 seconds
    return [*samples, torch.zeros(50), long]


def transcribed(
    whisper: Path, kind: str, batch: int, recordings: list[Any], options: TranscribeOptions
) -> list[SideTranscript]:
    with open_speech_side(SideSpec(str(whisper), kind=kind, device="cpu"), batch=batch) as transcriber:
        return transcriber.transcribe(recordings, [options] * len(recordings))


@pytest.mark.stays("options1")
@pytest.mark.parametrize("options", [{}, {"timestamps": False}])
@pytest.mark.slow
def test_both_transcribe_the_same(
    whisper: Path, recordings: list[torch.Tensor], options: dict[str, Any]
) -> None:
    asked = TranscribeOptions(temperatures=(0.0,), max_new_tokens=12, **options)
    given = recordings if asked.timestamps else recordings[:-1]
    ours = transcribed(whisper, "ingot", 4, given, asked)
    for batch in (1, 3):
        theirs = transcribed(whisper, HUGGINGFACE, batch, given, asked)
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        assert [one.text for one in ours] == [one.text for one in theirs]
        assert ours[0].language == theirs[0].language
    assert ours[3] == SideTranscript("", [], asked.language)
    assert len(ours[0].token_ids) > 0


def test_what_the_class_lacks(whisper: Path, recordings: list[torch.Tensor]) -> None:
    lacking: list[tuple[dict[str, Any], str]] = [
        ({"timestamps": False}, "behind 30 s"),
        ({"hotwords": "Ingot"}, "hotwords"),
        ({"initial_prompt": "Ingot", "carry_initial_prompt": True}, "carry_initial_prompt"),
        ({"chunked": True}, "chunked"),
        ({"clip_timestamps": (1.0, 2.0)}, "clip_timestamps"),
        ({"word_timestamps": True, "hallucination_silence_threshold": 1.0}, "word_timestamps"),
    ]
    for options, reported in lacking:
        with raises_shown(RequestError, reported):
            transcribed(whisper, HUGGINGFACE, 1, recordings[-1:], TranscribeOptions(**options))


def test_the_verb(whisper: Path, clips: list[Path], tmp_path: Path) -> None:
    quick = ("--max-new-tokens", "9", "--device", "cpu", "--compare", "hf")
    missing = tmp_path / "missing.wav"
    found = ingot("transcribe", whisper, *clips, missing, *quick)
    assert found.exit_code == 1
    assert "3 same, 0 different" in found.stdout
    assert f"{missing}: there is no such audio file" in found.stderr
    record = json.loads(ingot("transcribe", whisper, *clips[:2], *quick, "-f", "json").stdout)
    assert (record["same"], record["different"]) == (2, 0)
    assert all(side["seconds"] > 0 and side["rtfx"] > 0 for side in record["sides"])
    assert record["options"]["temperatures"] == [0.0]
    refused = ingot("transcribe", whisper, clips[0], *quick, "-o", tmp_path)
    assert (refused.exit_code, "--compare" in refused.stderr) == (2, True)
    assert ingot("transcribe", whisper, clips[0], *quick[:-1], "vllm").exit_code == 2
