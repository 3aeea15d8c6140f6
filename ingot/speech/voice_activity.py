"""Voice activity detection (WebRTC), and the chunks of a recording that contain speech."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ingot.audio.log_mel import RATE, WINDOW
from ingot.errors import RequestError, to_install

_FRAME = 480  # samples: 30 ms, the longest that the detector takes
_CUT = RATE // 10  # samples of a part that is compared for loudness
Detector = Callable[[torch.Tensor], Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class VoiceDetector:
    """WebRTC's detector; called with samples [N] at 16 kHz it returns stretches of speech, (start, end) in
    seconds.

    Attributes:
        mode: 0 to 3; the higher, the less counts as speech.
        min_speech: seconds; shorter stretches are dropped.
        min_silence: seconds; a shorter pause does not end a stretch.
        pad: seconds added before and after a stretch.

    Raises:
        RequestError: a value is out of range, or the package is missing.
    """

    mode: int = 2
    min_speech: float = 0.2
    min_silence: float = 0.5
    pad: float = 0.2

    def __post_init__(self) -> None:
        if self.mode not in range(4):
            raise RequestError("mode is out of range", seen=self.mode, allowed="0 to 3", field="mode")
        for name in ("min_speech", "min_silence", "pad"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RequestError(f"{name} must be seconds", seen=getattr(self, name), field=name)

    def __call__(self, samples: torch.Tensor) -> list[tuple[float, float]]:
        """Stretches of speech, in order."""
        voiced = np.concatenate([[False], self._voiced(samples), [False]])
        edges = np.flatnonzero(voiced[1:] != voiced[:-1]) * (_FRAME / RATE)
        seconds = len(samples) / RATE
        found: list[tuple[float, float]] = []
        for start, end in _joined(zip(edges[::2], edges[1::2], strict=True), self.min_silence):
            if end - start >= self.min_speech:
                found.append((max(start - self.pad, 0.0), min(end + self.pad, seconds)))
        return _joined(found, 0.0)

    def _voiced(self, samples: torch.Tensor) -> list[bool]:
        """Whether each frame has speech; the last one is padded with silence."""
        if importlib.util.find_spec("webrtcvad") is None:
            raise RequestError("detecting speech needs webrtcvad-wheels", fix=to_install("speech"))
        import webrtcvad

        detector = webrtcvad.Vad(self.mode)
        found: list[bool] = []
        for part in samples.split(2000 * _FRAME):  # a minute at a time saves memory
            words = (part.clamp(-1, 1) * 32767).to(torch.int16).numpy()
            words = np.pad(words, (0, -len(words) % _FRAME)).reshape(-1, _FRAME)
            found += [detector.is_speech(frame.tobytes(), RATE) for frame in words]
        return found


def speech_chunks(samples: torch.Tensor, detector: Detector) -> list[tuple[int, int]]:
    """Chunks with all stretches of speech, as many in each as fit in 30 s: (first sample, end). A longer
    stretch is cut where it is quietest.

    Args:
        samples: float32 [N] at 16 kHz.
        detector: samples → (start, end) of each stretch in seconds, in order.

    Raises:
        RequestError: the detector returns something else.
    """
    chunks: list[tuple[int, int]] = []
    for start, end in _checked(detector(samples), len(samples) / RATE):
        for piece in _pieces(samples, round(start * RATE), min(round(end * RATE), len(samples))):
            if chunks and piece[1] - chunks[-1][0] <= WINDOW:
                chunks[-1] = chunks[-1][0], piece[1]
            else:
                chunks.append(piece)
    return chunks


def silences(chunks: Sequence[tuple[int, int]], detector: Detector) -> list[float]:
    """Seconds that the detector has put before the speech of each chunk: none where a stretch was cut, the
    recording begins, or the detector is another.
    """
    pad = detector.pad if isinstance(detector, VoiceDetector) else 0.0
    ends = [0, *(end for _, end in chunks)]
    return [0.0 if start in (0, end) else pad for (start, _), end in zip(chunks, ends, strict=False)]


def _checked(found: object, seconds: float) -> list[tuple[float, float]]:
    """A detector's result, if it is stretches of the recording."""
    try:
        spans = [(float(start), float(end)) for start, end in found]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise _bad(found, seconds) from None
    ends = [0.0, *(end for _, end in spans)]
    for (start, end), before in zip(spans, ends, strict=False):
        if not before <= start < end <= seconds + 1 / RATE:  # NaN fails, too
            raise _bad((start, end), seconds)
    return spans


def _bad(seen: object, seconds: float) -> RequestError:
    return RequestError(
        "the voice detector returned something that is no stretches of speech",
        seen=repr(seen)[:80],
        allowed=f"pairs (start, end) in order, apart, in seconds from 0 to {seconds:.3f}",
        fix="the function that was given as vad",
    )


def _pieces(samples: torch.Tensor, start: int, end: int) -> list[tuple[int, int]]:
    """A stretch in parts of at most 30 s."""
    pieces = []
    while end - start > WINDOW:
        half = start + WINDOW // 2
        power = samples[half : start + WINDOW].square().unflatten(0, (-1, _CUT)).sum(1)
        cut = half + int(power.argmin()) * _CUT + _CUT // 2
        pieces.append((start, cut))
        start = cut
    return [*pieces, (start, end)]


def _joined(spans: Iterable[tuple[float, float]], pause: float) -> list[tuple[float, float]]:
    """Stretches, joined where the pause between them is not longer."""
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start - found[-1][1] <= pause:
            found[-1] = found[-1][0], float(end)
        else:
            found.append((float(start), float(end)))
    return found
