"""Transcripts as files: text, subtitles, tables, JSON.

Owns the five formats. With words, subtitles have lines of their own, cut at pauses or where a line
is full. Knows no audio.

    path.write_text(WRITERS["srt"](transcript))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple

from ingot.speech.recording import Transcript
from ingot.speech.segments import Word

_LINE = 42  # characters
_LINES = 2
_PAUSE = 3.0  # seconds


class Cue(NamedTuple):
    """A subtitle's times in seconds, and its text."""

    start: float
    end: float
    text: str


def as_text(found: Transcript) -> str:
    """A segment a line."""
    return "".join(f"{segment.text.strip()}\n" for segment in found.segments if segment.text.strip())


def as_srt(found: Transcript) -> str:
    """SubRip."""
    return "\n".join(
        f"{number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n{cue.text.replace('-->', '->')}\n"
        for number, cue in enumerate(cues(found), start=1)
    )


def as_vtt(found: Transcript) -> str:
    """WebVTT."""
    told = "".join(
        f"\n{clock(cue.start, '.')} --> {clock(cue.end, '.')}\n{cue.text.replace('-->', '->')}\n"
        for cue in cues(found)
    )
    return f"WEBVTT\n{told}"


def as_tsv(found: Transcript) -> str:
    """A table of segments with times in milliseconds."""
    rows = (
        f"{round(1000 * segment.start)}\t{round(1000 * segment.end)}\t{_one_cell(segment.text)}\n"
        for segment in found.segments
        if segment.text.strip()
    )
    return "start\tend\ttext\n" + "".join(rows)


def as_json(found: Transcript) -> str:
    """Everything."""
    return json.dumps({"text": found.text} | asdict(found), ensure_ascii=False, indent=1) + "\n"


WRITERS: dict[str, Callable[[Transcript], str]] = {
    "txt": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "tsv": as_tsv,
    "json": as_json,
}


def cues(found: Transcript) -> Iterator[Cue]:
    """Subtitles: segments, or, where words are known, lines of them."""
    for segment in found.segments:
        if segment.words:
            yield from _lines(segment.words)
        elif segment.text.strip():
            yield Cue(segment.start, segment.end, segment.text.strip())


def _lines(words: list[Word]) -> Iterator[Cue]:
    taken: list[Word] = []
    lines = [""]
    for word in words:
        paused = bool(taken) and word.start - taken[-1].end > _PAUSE
        full = len((lines[-1] + word.text).strip()) > _LINE
        if taken and (paused or (full and len(lines) == _LINES)):
            yield _cue(taken, lines)
            taken, lines = [], [""]
        elif taken and full:
            lines.append("")
        taken.append(word)
        lines[-1] += word.text
    if taken:
        yield _cue(taken, lines)


def _cue(words: list[Word], lines: list[str]) -> Cue:
    return Cue(words[0].start, words[-1].end, "\n".join(line.strip() for line in lines))


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds, as both subtitle formats take them."""
    whole, ms = divmod(round(1000 * max(seconds, 0)), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{ms:03}"


def _one_cell(text: str) -> str:
    return " ".join(text.split())
