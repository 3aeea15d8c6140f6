"""Windows of speech to calibrate with, from a manifest or a folder of recordings.

A manifest is one of ``ingot eval wer``: one record per line, or LibriSpeech's folder; a folder without
transcripts gives all its recordings. The text is known of a recording that is no longer than a window; a
longer one is cut into whole windows without a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot.audio.librispeech import TRANSCRIPTS, librispeech, transcripts
from ingot.audio.log_mel import HOP, RATE, LongLogMel
from ingot.audio.recording_samples import SUFFIXES, audio_seconds, read_audio
from ingot.building.calibration.calibration_data import token_ids
from ingot.building.calibration.sample_records import (
    BadSample,
    Numbered,
    evenly,
    made_of,
    raw_file,
    read_records,
    text_of,
)
from ingot.text.languages import language_code

SHAPES = (
    '{"audio": "…", "text": "…", "language": "…"}, of which audio alone is needed, or {"audio": "…", '
    '"token_ids": […]}; or a folder of recordings'
)
_AUDIO = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class SpokenWindow:
    """A part of a recording.

    Attributes:
        features: float32 [mels, frames].
        text, language: its transcript and the language's code, where a manifest has them.
        token_ids: all that the decoder reads with it, where a manifest has them.
    """

    features: torch.Tensor
    text: str | None = None
    language: str | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class SpokenData:
    """What was chosen of a manifest of so many ``records``; ``sha256`` is of it and of the recordings."""

    windows: tuple[SpokenWindow, ...]
    records: int
    sha256: str


@dataclass(frozen=True)
class _Recording:
    """A record that was checked, by the header of its file."""

    path: Path
    seconds: float
    text: str | None
    language: str | None
    token_ids: tuple[int, ...] | None


def read_windows(path: Path, mels: int, frames: int, count: int) -> SpokenData:
    """At most ``count`` windows of ``frames``, evenly spread over recordings that are evenly spread over the
    manifest. Raises ConfigError where it cannot be read, or a chosen record is no recording.
    """
    digest = hashlib.sha256()
    records, folder = _records(path, digest)
    recordings = made_of(path, evenly(records, count), partial(_recording, folder), SHAPES)
    length = frames * HOP
    places = [
        (one, start)
        for one in recordings
        for start in range(max(1, int(one.seconds * RATE) // length))  # a rest is left out
    ]
    found: list[SpokenWindow] = []
    current: tuple[Path, LongLogMel] | None = None
    for one, start in evenly(places, count):
        if current is None or current[0] != one.path:
            digest.update(one.path.read_bytes())
            current = one.path, LongLogMel(read_audio(one.path), mels, _AUDIO)
        first, mel = start * frames, current[1]
        last = min(first + frames, mel.num_frames)  # behind it are zeros, as where it is transcribed
        features = mel.window(first, last, frames).features
        if one.seconds * RATE > features.shape[1] * HOP:  # text and ids are of a whole recording
            found.append(SpokenWindow(features, language=one.language))
        else:
            found.append(SpokenWindow(features, one.text, one.language, one.token_ids))
    return SpokenData(tuple(found), len(records), digest.hexdigest())


def _records(path: Path, digest: Any) -> tuple[list[Numbered], Path]:
    """All records, and the folder that their recordings are relative to."""
    if path.suffix.lower() in SUFFIXES and path.is_file():
        return [(1, {"audio": path.name})], path.parent
    if not path.is_dir():
        raw = raw_file(path)
        digest.update(raw)
        return read_records(path, raw, SHAPES), path.parent
    if any(path.rglob(TRANSCRIPTS)):
        for file in transcripts(path):
            digest.update(file.read_bytes())
        return list(librispeech(path)), path
    inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    return [(place, {"audio": str(file.relative_to(path))}) for place, file in enumerate(inside, 1)], path


def _recording(folder: Path, record: Mapping[str, Any]) -> _Recording:
    audio, text, language = (record.get(field) for field in ("audio", "text", "language"))
    if audio is None:
        raise BadSample("it names no audio, and this is a speech model")
    file = folder / text_of(audio)
    if not file.is_file():
        raise BadSample(f"there is no such audio file: {file}")
    seconds = audio_seconds(file)
    if not seconds:
        raise BadSample(f"no audio that can be read: {file}")
    ids = tuple(token_ids(record)) if "token_ids" in record else None
    if ids == ():
        raise BadSample("it has no tokens")
    text, language = (None if one is None else text_of(one) for one in (text, language))
    return _Recording(file, seconds, text, None if language is None else language_code(language), ids)
