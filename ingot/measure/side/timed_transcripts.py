"""Recordings heard by one side, and how long that takes.

Owns the order and the clock: files are read apart from it, a few at a time. Knows no metric.

    took = hear_all(listener, ["a.flac"], [TranscribeOptions(language="en")])
    took.heard[0].text, took.seconds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ingot.audio.log_mel import RATE
from ingot.audio.recording_samples import read_audio
from ingot.measure.side.transcribers import Heard, Listener
from ingot.speech.speech_options import TranscribeOptions

_MOST_SECONDS = 2 * 3600  # of audio in memory: 460 MB


@dataclass
class Hearing:
    """What a side makes of recordings, in their order.

    Attributes:
        seconds: from samples to text, of all.
        audio: seconds of each recording.
        times: seconds of those that were heard one after another.
    """

    seconds: float = 0.0
    heard: list[Heard] = field(default_factory=list)
    audio: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def rtfx(self) -> float | None:
        """Seconds of audio per second."""
        return round(sum(self.audio) / self.seconds, 3) if self.seconds > 0 else None


def hear_all(
    listener: Listener,
    recordings: Sequence[str | Path | torch.Tensor],
    asked: Sequence[TranscribeOptions],
    together: int = 1,
    heard: Callable[[int], None] = lambda done: None,
) -> Hearing:
    """Hear recordings, at most ``together`` of them given at once, and two hours unless one is longer;
    ``heard`` is told how many are done.

    Raises:
        RequestError: one cannot be read.
    """
    found = Hearing()
    for samples in _parts(recordings, together):
        options = asked[len(found.heard) : len(found.heard) + len(samples)]
        start = time.perf_counter()
        found.heard += listener.hear(samples, options)
        seconds = time.perf_counter() - start
        found.seconds += seconds
        found.audio += [len(one) / RATE for one in samples]
        found.times += [seconds] if together == 1 else []
        heard(len(found.heard))
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
