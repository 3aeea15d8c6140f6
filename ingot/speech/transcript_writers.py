"""Transcripts as files: text, subtitles, tables, JSON.

Covers the five formats. Independent of audio, and of where subtitles break (subtitles.py).

    path.write_text(written(transcript, "srt", SubtitleLayout(max_line_width=42, max_line_count=2)))
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ingot.speech.recording_features import Transcript
from ingot.speech.segments import Word
from ingot.speech.subtitles import PLAIN, SubtitleLayout, cues


def as_text(found: Transcript) -> str:
    """A segment a line."""
    return "".join(f"{segment.text.strip()}\n" for segment in found.segments if segment.text.strip())


def as_srt(found: Transcript, layout: SubtitleLayout = PLAIN) -> str:
    """SubRip."""
    return "\n".join(
        f"{number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n{cue.text.replace('-->', '->')}\n"
        for number, cue in enumerate(cues(found, layout), start=1)
    )


def as_vtt(found: Transcript, layout: SubtitleLayout = PLAIN) -> str:
    """WebVTT."""
    blocks = "".join(
        f"\n{clock(cue.start, '.')} --> {clock(cue.end, '.')}\n{cue.text.replace('-->', '->')}\n"
        for cue in cues(found, layout)
    )
    return f"WEBVTT\n{blocks}"


def as_tsv(found: Transcript) -> str:
    """A table of segments with times in milliseconds."""
    rows = (
        f"{round(1000 * segment.start)}\t{round(1000 * segment.end)}\t{_one_cell(segment.text)}\n"
        for segment in found.segments
        if segment.text.strip()
    )
    return "start\tend\ttext\n" + "".join(rows)


def as_json(found: Transcript) -> str:
    """Everything, with the original's names."""
    record: dict[str, Any] = {"text": found.text} | asdict(found)
    for segment, own in zip(record["segments"], found.segments, strict=True):
        segment["words"] = None if own.words is None else [_word(word) for word in own.words]
    return json.dumps(record, ensure_ascii=False, indent=1) + "\n"


WRITERS: dict[str, Callable[[Transcript], str]] = {
    "txt": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "tsv": as_tsv,
    "json": as_json,
}


def written(found: Transcript, format: str, layout: SubtitleLayout = PLAIN) -> str:
    """A transcript in one of the ``WRITERS``' formats; ``layout`` is of subtitles alone."""
    if format == "srt":
        return as_srt(found, layout)
    return as_vtt(found, layout) if format == "vtt" else WRITERS[format](found)


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds, as both subtitle formats take them."""
    total_seconds, ms = divmod(round(1000 * max(seconds, 0)), 1000)
    minutes, second = divmod(total_seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{ms:03}"


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.text, "start": word.start, "end": word.end, "probability": word.probability}


def _one_cell(text: str) -> str:
    return " ".join(text.split())
