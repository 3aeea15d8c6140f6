"""Recordings transcribed by one side, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ingot.audio.log_mel import RATE
from ingot.audio.recording_samples import read_audio
from ingot.measure.side.transcribers import SideTranscript, SpeechSide
from ingot.speech.speech_options import TranscribeOptions

_MOST_SECONDS = 2 * 3600  # of audio in memory: 460 MB


@dataclass
class TranscriptionRun:
    """Transcripts in the recordings' order, and seconds: from samples to text, of each one's audio, and from
    samples to text of each if transcribed one after another.
    """

    seconds: float = 0.0
    transcripts: list[SideTranscript] = field(default_factory=list)
    audio: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def rtfx(self) -> float | None:
        """Seconds of audio per second."""
        return round(sum(self.audio) / self.seconds, 3) if self.seconds > 0 else None


def transcribe_all(
    side: SpeechSide,
    recordings: Sequence[str | Path | torch.Tensor],
    asked: Sequence[TranscribeOptions],
    together: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> TranscriptionRun:
    """Transcribe recordings, at most ``together`` and two hours of them at once; ``progress`` gets how many
    are done. Files are read outside the measured time.
    """
    found = TranscriptionRun()
    for samples in _parts(recordings, together):
        options = asked[len(found.transcripts) : len(found.transcripts) + len(samples)]
        start = time.perf_counter()
        found.transcripts += side.transcribe(samples, options)
        seconds = time.perf_counter() - start
        found.seconds += seconds
        found.audio += [len(one) / RATE for one in samples]
        found.times += [seconds] if together == 1 else []
        progress(len(found.transcripts))
    return found


def _parts(recordings: Sequence[str | Path | torch.Tensor], together: int) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    for one in recordings:
        part.append(one if isinstance(one, torch.Tensor) else read_audio(one))
        if len(part) == together or sum(map(len, part)) > _MOST_SECONDS * RATE:
            yield part
            part = []
    if part:
        yield part
