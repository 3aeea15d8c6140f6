"""Finds hallucinated segments by their words' times and probabilities.

Source: OpenAI's Whisper, ``transcribe`` with ``hallucination_silence_threshold``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.audio.log_mel import WINDOW_SECONDS
from ingot.speech.segments import Segment
from ingot.speech.speech_options import APPENDED, PREPENDED

_UNLIKELY = 0.15  # probability of a word
_SHORT, _LONG = 0.133, 2.0  # seconds of a word
_JUDGED = 8  # words of a segment
_SUSPECT = 3.0
_MARKS = PREPENDED + APPENDED
_EDGE = 2.0  # seconds at a window's ends that count as silence


@dataclass(frozen=True)
class WindowTimes:
    """A window's times in seconds. ``end``: of its sound; ``recording_end``: of the whole recording."""

    start: float
    end: float
    recording_end: float

    @property
    def window_end(self) -> float:
        """The end with the silence after the recording."""
        return self.start + WINDOW_SECONDS


def is_made_up(segment: Segment | None) -> bool:
    """Whether its first words are too unlikely, too short or too long to be spoken."""
    if segment is None or not segment.words:
        return False
    words = [word for word in segment.words if word.text not in _MARKS][:_JUDGED]
    score = 0.0
    for word in words:
        duration = word.end - word.start
        unlikely = 1.0 if word.probability < _UNLIKELY else 0.0
        score += unlikely + max(_SHORT - duration, 0.0) * 15 + max(duration - _LONG, 0.0)
    return score >= _SUSPECT or score + 0.01 >= len(words)


def without_hallucinations(
    segments: Sequence[Segment], times: WindowTimes, threshold: float, last_end: float, seek: float | None
) -> tuple[list[Segment] | None, float | None]:
    """Segments that stay, and where the next window begins, in seconds.

    Made-up segments are dropped where silence longer than the threshold, or more of them, surround them.
    None: the silence before the first one is skipped, and the window is transcribed again after it.

    Args:
        last_end: of the words before the window.
        seek: where the next window begins if all stay.
    """
    first = _next_with_words(segments)
    if first is not None and is_made_up(first) and first.start - times.start > threshold:
        return None, first.start
    for index, segment in enumerate(segments):
        if not segment.words:
            continue
        if is_made_up(segment):
            following = _next_with_words(segments[index + 1 :])
            next_start = following.words[0].start if following and following.words else times.end
            before = (
                segment.start - last_end > threshold
                or segment.start < threshold
                or segment.start - times.start < _EDGE
            )
            behind = (
                next_start - segment.end > threshold
                or is_made_up(following)
                or times.window_end - segment.end < _EDGE
            )
            if before and behind:
                again = max(times.start + 1.0, segment.start)
                ends = times.recording_end - segment.end < threshold
                return list(segments[:index]), times.recording_end if ends else again
        last_end = segment.end
    return list(segments), seek


def _next_with_words(segments: Sequence[Segment]) -> Segment | None:
    return next((segment for segment in segments if segment.words), None)


def seek_behind_words(times: WindowTimes, last_end: float, threshold: float) -> float:
    """Where the next window begins after an open one: after its last word, if too long a silence follows."""
    return last_end if times.window_end - last_end > threshold else times.end
