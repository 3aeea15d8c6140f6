"""Segments and words to subtitles, laid out as OpenAI's Whisper does."""

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
    """How words become subtitles; without words, each segment is one.

    Attributes:
        max_line_width: characters per line; None: a line ends with its segment.
        max_line_count: lines per subtitle; only with ``max_line_width``. With both a subtitle may continue in
            the next segment, and ends at a pause.
        max_words_per_line: words per subtitle; ignored where both others are given.
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
    """Text with its times in seconds: a subtitle, or one of its words."""

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


def _groups(segments: Sequence[Segment], layout: SubtitleLayout) -> Iterator[list[Cue]]:
    """The words of each subtitle, with the space or line break before them."""
    width = layout.max_line_width or math.inf
    most_lines = math.inf if layout.max_line_count is None else layout.max_line_count
    most_words = layout.max_words_per_line
    by_segment = layout.max_line_width is None or layout.max_line_count is None
    shown: list[Cue] = []
    length, lines, last = 0, 1, 0.0
    for segment in segments:
        text_only = [Word(segment.text, segment.start, segment.end, 1.0)] if segment.text.strip() else []
        for index, word in enumerate(segment.words or text_only):
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
            shown.append(Cue(word.start, word.end, text))
            last = word.start
    if shown:
        yield shown


def _highlighted(words: Sequence[Cue]) -> Iterator[Cue]:
    """The same text for each word, and for each pause between two."""
    last = words[0].start
    for index, word in enumerate(words):
        if _ms(word.start) > _ms(last):
            yield Cue(last, word.start, "".join(one.text for one in words))
        texts, bare = [one.text for one in words], word.text.lstrip()
        texts[index] = f"{word.text[: len(word.text) - len(bare)]}<u>{bare}</u>"
        yield Cue(word.start, word.end, "".join(texts))
        last = word.end


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
