"""A window's tokens to segments with times (source: OpenAI's Whisper, ``transcribe``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ingot.audio.log_mel import HOP, RATE
from ingot.errors import EngineError
from ingot.speech.window_decoding import Decoded, Vocabulary


@dataclass
class Word:
    """A word with its times in seconds, and the mean probability of its tokens."""

    text: str
    start: float
    end: float
    probability: float


@dataclass
class Segment:
    """The text from ``start`` to ``end`` (seconds).

    ``tokens`` include the timestamps around it. Temperature, log-probability, ratio and probability of no
    speech are of its window, which begins at ``seek`` frames of 10 ms.
    """

    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[Word] | None = field(default=None)
    seek: int = 0


class WindowSegments(NamedTuple):
    """Segments of a window, and the seconds from its start to the next one's. ``closed``: its end is
    known.
    """

    segments: list[Segment]
    seconds: float
    closed: bool


def moved(segment: Segment, number: int, start: float, end: float, silence: float = 0.0) -> Segment:
    """A segment of a chunk from ``start`` to ``end`` (seconds) as one of the recording, with its number
    there. ``silence``: seconds at the chunk's start: of a sentence that follows it models often say that it
    begins at 0. Words have times of their own.
    """

    def at(seconds: float) -> float:
        return round(min(start + seconds, end), 3)

    words = segment.words and [replace(one, start=at(one.start), end=at(one.end)) for one in segment.words]
    seek = segment.seek + round(start * RATE / HOP)
    first = min(silence, segment.end) if segment.start == 0 and not words else segment.start
    return replace(segment, id=number, start=at(first), end=at(segment.end), words=words, seek=seek)


def end_at(segment: Segment, end: float) -> None:
    """Limit the times of a segment and its words to ``end``, in seconds. The original does not, though a
    model whose sound breaks off may name any time of its window.
    """
    for one in (segment, *(segment.words or ())):
        one.start, one.end = min(one.start, end), min(one.end, end)


def split_window(decoded: Decoded, vocabulary: Vocabulary, start: float, seconds: float) -> WindowSegments:
    """Segments of a window, empty ones included: their tokens count where words are placed. A window whose
    last segment has no end is transcribed again from there.

    Args:
        start: of the window, in seconds.
        seconds: of the recording in the window.

    Raises:
        EngineError: a timestamp is before an earlier one, which the rules of transcripts rule out.
    """
    tokens, names = decoded.tokens, vocabulary.tokens
    _check_order(tokens, vocabulary, start)
    times = [token >= names.first_timestamp for token in tokens]
    ends = [i + 1 for i in range(len(tokens) - 1) if times[i] and times[i + 1]]
    closed = times[-2:] == [False, True]
    if not ends:  # one segment, to its last timestamp, if that is not 0
        first = names.first_timestamp
        last = next((token for token in reversed(tokens) if token >= first), first)
        length = seconds if last == first else names.seconds(last)
        return WindowSegments([_segment(decoded, vocabulary, tokens, start, start + length)], seconds, closed)
    if closed:
        ends.append(len(tokens))
    pieces = [tokens[first:last] for first, last in zip([0, *ends], ends, strict=False)]
    found = [
        _segment(
            decoded, vocabulary, piece, start + names.seconds(piece[0]), start + names.seconds(piece[-1])
        )
        for piece in pieces
    ]
    return WindowSegments(found, seconds if closed else names.seconds(tokens[ends[-1] - 1]), closed)


def _check_order(tokens: Sequence[int], vocabulary: Vocabulary, start: float) -> None:
    """The device applies the rules of timestamps; the host checks the result, whatever kernel ran."""
    names = vocabulary.tokens
    times = [names.seconds(token) for token in tokens if token >= names.first_timestamp]
    for earlier, later in itertools.pairwise(times):
        if later < earlier:
            raise EngineError(
                "the timestamps of a transcript cross, so the engine broke the rules of transcripts",
                seen=f"{start + later:.2f} s after {start + earlier:.2f} s, in the window at {start:.2f} s",
                allowed="times that never decrease",
                fix="run `ingot verify` on the engine, and transcribe with another `device` to compare",
            )


def clear_if_empty(segment: Segment) -> None:
    """Empty a segment that takes no time or has no text."""
    if segment.start == segment.end or not segment.text.strip():
        segment.text, segment.tokens = "", []
        segment.words = None if segment.words is None else []


def _segment(
    decoded: Decoded, vocabulary: Vocabulary, tokens: Sequence[int], start: float, end: float
) -> Segment:
    return Segment(
        0,
        round(start, 3),
        round(end, 3),
        vocabulary.text(tokens),
        list(tokens),
        decoded.temperature,
        decoded.avg_logprob,
        decoded.compression_ratio,
        decoded.no_speech_prob,
    )
