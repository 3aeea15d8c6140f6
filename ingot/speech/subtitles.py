"""Segments and words → subtitles, laid out as OpenAI's Whisper lays them out.

Covers the options of the layout, and where lines and subtitles break. Independent of file formats.

    for cue in cues(transcript, SubtitleLayout(max_line_width=42, max_line_count=2)): ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ingot.errors import RequestError
from ingot.speech.recording_features import Transcript
from ingot.speech.segments import Segment, Word

_PAUSE = 3.0  # seconds from the beginning of a word to that of the next


@dataclass(frozen=True)
class SubtitleLayout:
    """How words become subtitles; without words, each segment is one, whatever is here.

    Attributes:
        max_line_width: characters of a line; None: a line ends with its segment.
        max_line_count: lines of a subtitle; it counts with ``max_line_width`` alone, and with both a subtitle
            may go on into the next segment, and ends at a pause.
        max_words_per_line: words of a subtitle; without effect where both others are given.
        highlight_words: a subtitle for each word, in which that word is underlined.
    """

    max_line_width: int | None = None
    max_line_count: int | None = None
    max_words_per_line: int | None = None
    highlight_words: bool = False

    def __post_init__(self) -> None:
        for name in ("max_line_width", "max_line_count", "max_words_per_line"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise RequestError(f"{name} must be positive", seen=value, allowed="1 or more", field=name)


class Cue(NamedTuple):
    """A subtitle's times in seconds, and its text."""

    start: float
    end: float
    text: str


PLAIN = SubtitleLayout()


def cues(found: Transcript, layout: SubtitleLayout = PLAIN) -> Iterator[Cue]:
    """Subtitles of a transcript."""
    if not any(segment.words for segment in found.segments):
        for segment in found.segments:
            if segment.text.strip():
                yield Cue(segment.start, segment.end, segment.text.strip())
        return
    for words in _groups(found.segments, layout):
        if layout.highlight_words:
            yield from _highlighted(words)
        else:
            yield Cue(words[0].start, words[-1].end, "".join(word.text for word in words))


class _Shown(NamedTuple):
    """A word with what stands before it: a space, or the end of a line."""

    text: str
    start: float
    end: float


def _groups(segments: Sequence[Segment], layout: SubtitleLayout) -> Iterator[list[_Shown]]:
    """The words of each subtitle."""
    width = layout.max_line_width or math.inf
    most_lines = math.inf if layout.max_line_count is None else layout.max_line_count
    most_words = layout.max_words_per_line
    by_segment = layout.max_line_width is None or layout.max_line_count is None
    shown: list[_Shown] = []
    length, lines, last = 0, 1, 0.0
    for segment in segments:
        for index, word in enumerate(_words(segment)):
            begins = by_segment and (index % most_words == 0 if most_words else index == 0)
            paused = not by_segment and word.start - last > _PAUSE
            text = word.text
            if length and length + len(text) <= width and not paused and not begins:
                length += len(text)
            else:
                text, before, length = text.strip(), length, len(text.strip())
                if shown and (begins or paused or lines >= most_lines):
                    yield shown
                    shown, lines = [], 1
                elif before:
                    lines += 1
                    text = f"\n{text}"
            shown.append(_Shown(text, word.start, word.end))
            last = word.start
    if shown:
        yield shown


def _words(segment: Segment) -> Sequence[Word]:
    """A segment's words; its text is one where it has none."""
    if segment.words or not segment.text.strip():
        return segment.words or ()
    return [Word(segment.text, segment.start, segment.end, 1.0)]


def _highlighted(words: Sequence[_Shown]) -> Iterator[Cue]:
    """The same text for each word, and for each pause between two."""
    last = words[0].start
    for index, word in enumerate(words):
        if _ms(word.start) > _ms(last):
            yield Cue(last, word.start, "".join(one.text for one in words))
        shown = [_underlined(one.text) if place == index else one.text for place, one in enumerate(words)]
        yield Cue(word.start, word.end, "".join(shown))
        last = word.end


def _underlined(text: str) -> str:
    word = text.lstrip()
    return f"{text[: len(text) - len(word)]}<u>{word}</u>"


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
