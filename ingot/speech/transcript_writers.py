"""Transcripts as files: text, subtitles, tables, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ingot.speech.recording_features import Transcript
from ingot.speech.subtitles import PLAIN, Cue, SubtitleLayout, cues


def as_text(found: Transcript) -> str:
    """One segment per line."""
    return "".join(f"{segment.text.strip()}\n" for segment in found.segments if segment.text.strip())


def as_srt(found: Transcript, layout: SubtitleLayout = PLAIN) -> str:
    """SubRip."""
    return "\n".join(f"{n}\n{_block(cue, ',')}" for n, cue in enumerate(cues(found, layout), start=1))


def as_vtt(found: Transcript, layout: SubtitleLayout = PLAIN) -> str:
    """WebVTT."""
    return "WEBVTT\n" + "".join(f"\n{_block(cue, '.')}" for cue in cues(found, layout))


def as_tsv(found: Transcript) -> str:
    """A table of segments with times in milliseconds."""
    rows = (
        f"{round(1000 * one.start)}\t{round(1000 * one.end)}\t{' '.join(one.text.split())}\n"
        for one in found.segments
        if one.text.strip()
    )
    return "start\tend\ttext\n" + "".join(rows)


def as_json(found: Transcript) -> str:
    """Everything, with the original's names."""
    record: dict[str, Any] = {"text": found.text} | asdict(found)
    for segment in record["segments"]:
        if segment["words"] is not None:
            segment["words"] = [{"word": word.pop("text"), **word} for word in segment["words"]]
    return json.dumps(record, ensure_ascii=False, indent=1) + "\n"


WRITERS: dict[str, Callable[[Transcript], str]] = {
    "txt": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "tsv": as_tsv,
    "json": as_json,
}


def written(found: Transcript, format: str, layout: SubtitleLayout = PLAIN) -> str:
    """A transcript in one of the ``WRITERS``' formats; only subtitles have a ``layout``."""
    if format == "srt":
        return as_srt(found, layout)
    return as_vtt(found, layout) if format == "vtt" else WRITERS[format](found)


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds, as both subtitle formats take them."""
    total_seconds, ms = divmod(round(1000 * max(seconds, 0)), 1000)
    minutes, second = divmod(total_seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{ms:03}"


def _block(cue: Cue, point: str) -> str:
    text = cue.text.replace("-->", "->")
    return f"{clock(cue.start, point)} --> {clock(cue.end, point)}\n{text}\n"
