"""Speech to calibrate with, as the model reads it: windows, and the ids that the decoder reads with them.

Recordings are those of a manifest of ``ingot eval wer``, with one record per line, or of LibriSpeech's
folder; a folder without transcripts gives all its recordings. The text is known of a recording that is no
longer than a window; a longer one is cut into whole windows without a text.

The ids are a transcript's behind what frames it, else those that the checkpoint itself gives, one likeliest
token after another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot.audio.librispeech import TRANSCRIPTS, librispeech, transcripts
from ingot.audio.log_mel import HOP, RATE, LongLogMel
from ingot.audio.recording_samples import SUFFIXES, audio_seconds, read_audio
from ingot.building.calibration.calibrate import Held, dense_model
from ingot.building.calibration.calibration_data import CalibrationData, SampleFile, token_ids
from ingot.building.calibration.sample_records import (
    BadSample,
    Numbered,
    evenly,
    file_records,
    made_of,
    needed,
    text_of,
)
from ingot.building.calibration.walk_halves import unseen
from ingot.building.golden.golden_cases import steady_threads
from ingot.device import parse_dtype
from ingot.engine.reference_encoder import encode
from ingot.engine.reference_run import EXACT, ReferenceRun, SequenceSpan
from ingot.memory.host_memory import dense_bytes
from ingot.models.speech_tokens import SpeechTokens
from ingot.models.whisper_generation import SpeechGeneration
from ingot.text.languages import language_code

SHAPES = (
    '{"audio": "…", "text": "…", "language": "…"}, of which audio alone is needed, or {"audio": "…", '
    '"token_ids": […]}; or a folder of recordings'
)
_FRAMES_OF_A_POSITION = 2
_BATCH = 8  # windows that are written at once: keys and values of one take 0.5 GB in a large model


@dataclass(frozen=True, eq=False)
class _Window:
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


@dataclass(frozen=True)
class _Recording:
    """A record that was checked, by the header of its file."""

    path: Path
    seconds: float
    text: str | None
    language: str | None
    token_ids: tuple[int, ...] | None


def read_speech(given: SampleFile) -> CalibrationData:
    """At most ``count`` windows of recordings, each with at most ``length`` ids.

    Raises CheckpointError where nothing says which ids frame a transcript; RequestError where a recording
    cannot be read, or the model does not know its language.
    """
    encoder = given.config.encoder
    assert encoder is not None
    frames = _FRAMES_OF_A_POSITION * encoder.max_positions
    windows, records, sha256 = _windows(given.path, encoder.features[0], frames, given.count)
    ids = [one.token_ids or () for one in windows]
    unknown = [place for place, own in enumerate(ids) if not own]
    if unknown:
        writer = _Writer(given)
        for start in range(0, len(unknown), _BATCH):
            places = unknown[start : start + _BATCH]
            for place, own in zip(places, writer.ids([windows[i] for i in places]), strict=True):
                ids[place] = own
    samples = tuple(own[: given.length] for own in ids)
    return CalibrationData(given.path, samples, records, sha256, tuple(one.features for one in windows))


def _windows(path: Path, mels: int, frames: int, count: int) -> tuple[list[_Window], int, str]:
    """At most ``count`` windows of ``frames``, evenly spread over recordings that are evenly spread over the
    manifest; how many records it has; and the sha256 of it and the recordings.
    """
    digest = hashlib.sha256()
    records, folder = _records(path, count, digest)
    recordings = made_of(path, evenly(records, count), partial(_recording, folder), SHAPES)
    length = frames * HOP
    places = [
        (one, start)
        for one in recordings
        for start in range(max(1, int(one.seconds * RATE) // length))  # a rest is left out
    ]
    found: list[_Window] = []
    current: tuple[Path, LongLogMel] | None = None
    for one, start in evenly(places, count):
        if current is None or current[0] != one.path:
            digest.update(one.path.read_bytes())
            current = one.path, LongLogMel(read_audio(one.path), mels, torch.device("cpu"))
        first, mel = start * frames, current[1]
        last = min(first + frames, mel.num_frames)  # behind it are zeros, as where it is transcribed
        features = mel.window(first, last, frames).features
        if one.seconds * RATE > features.shape[1] * HOP:  # text and ids are of a whole recording
            found.append(_Window(features, language=one.language))
        else:
            found.append(_Window(features, one.text, one.language, one.token_ids))
    return found, len(records), digest.hexdigest()


def _records(path: Path, count: int, digest: Any) -> tuple[list[Numbered], Path]:
    """All records, and the folder that their recordings are relative to."""
    if path.suffix.lower() in SUFFIXES and path.is_file():
        return [(1, {"audio": path.name})], path.parent
    if not path.is_dir():
        return file_records(path, SHAPES, count, digest), path.parent
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


class _Kept(Held):
    """All weights so far: each token asks for them again."""

    def release(self) -> None:
        """Keep them."""


class _Writer:
    """The ids that a decoder reads with windows; the arithmetic is the walk's."""

    def __init__(self, given: SampleFile) -> None:
        config, assembly, device = given.config, given.assembly, given.device
        generation = SpeechGeneration.of(given.source.generation_config, config.vocab_size)
        self._tokenizer = given.text.tokenizer
        self._tokens = SpeechTokens.of_model(config.vocab_size, self._tokenizer).with_generation(generation)
        self._most = min(given.length, config.max_positions // 2)  # tokens of a window's text
        self._model = dense_model(assembly)
        self._weights = _Kept(partial(assembly.load, checkpoint=given.source, device=device), device)
        self._num_bytes = dense_bytes(config, parse_dtype(assembly.build.dtypes.wider))

    def ids(self, windows: Sequence[_Window]) -> list[tuple[int, ...]]:
        """Of each window: what frames a transcript, its text, the end."""
        run = ReferenceRun(self._model, self._weights, EXACT)
        with torch.inference_mode(), steady_threads(self._num_bytes, self._weights.device):
            for number, one in enumerate(windows):
                if one.text is None or self._detects(one):
                    encode(run, number, one.features, unseen)
            frames = [self._frame(run, number, one) for number, one in enumerate(windows)]
            texts = {}
            for n, one in enumerate(windows):
                if one.text is not None:
                    words = [" " + one.text.strip()]
                    texts[n] = needed(self._tokenizer, "a transcript").encode_parts(words)
            texts |= self._transcribed(run, {n: frame for n, frame in enumerate(frames) if n not in texts})
        return [(*frame, *texts[n], self._tokens.end) for n, frame in enumerate(frames)]

    def _detects(self, one: _Window) -> bool:
        return one.language is None and self._tokens.multilingual

    def _frame(self, run: ReferenceRun, number: int, one: _Window) -> list[int]:
        """The start of a window's transcript; the likeliest language is taken where none is named."""
        language = one.language
        if self._detects(one):
            codes = list(self._tokens.languages)
            first = SequenceSpan(-1 - number, (self._tokens.start,), 0, self._model.rope_offset(1), number)
            row = self._logits(run, [first])[0, [self._tokens.languages[code] for code in codes]]
            language = codes[int(row.argmax())]
        return self._tokens.prompt(language, "transcribe", timestamps=False)

    def _transcribed(self, run: ReferenceRun, frames: dict[int, list[int]]) -> dict[int, list[int]]:
        """The likeliest tokens behind each window's frame, up to the end or as many as are allowed."""
        written: dict[int, list[int]] = {number: [] for number in frames}
        new = dict(frames)
        while new:
            starts = {n: len(frames[n]) + len(written[n]) - len(ids) for n, ids in new.items()}
            offset = self._model.rope_offset(1)
            spans = [SequenceSpan(n, tuple(ids), starts[n], offset, n) for n, ids in new.items()]
            rows = self._logits(run, spans)
            for number, row in zip(list(new), rows, strict=True):
                token = int(row.argmax())
                if token == self._tokens.end or len(written[number]) == self._most:
                    del new[number]
                else:
                    written[number].append(token)
                    new[number] = [token]
        return written

    def _logits(self, run: ReferenceRun, spans: Sequence[SequenceSpan]) -> torch.Tensor:
        """After the last token of each, [spans, vocab_size]."""
        hidden = run.embed(spans)
        for index in range(run.config.num_layers):
            hidden = run.layer(index, hidden, spans, unseen)
        ends = torch.tensor([len(span.ids) for span in spans], device=hidden.device).cumsum(0) - 1
        return run.logits(run.final_norm(hidden[ends], unseen))
