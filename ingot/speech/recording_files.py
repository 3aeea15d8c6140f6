"""Transcribes many files, some at once; an error in one does not end the others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from ingot.audio.recording_samples import SUFFIXES
from ingot.errors import IngotError, RequestError
from ingot.speech.batched_windows import CancelToken, run_concurrently
from ingot.speech.recording_features import Transcript
from ingot.speech.segments import Segment
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.transcriber import Source, Transcriber
from ingot.speech.transcript_writers import WRITERS

TranscriptEvent = Segment | Transcript | IngotError


def transcribe_each(
    transcriber: Transcriber,
    sources: Sequence[Source],
    together: int = 1,
    *,
    allow_truncated: bool = False,
    **options: Any,
) -> Generator[tuple[int, TranscriptEvent], None, None]:
    """Segments of recordings as they come, each with its recording's position, then its transcript or its
    error. Closing the generator ends the work.

    Args:
        together: most recordings at once, limited by the engine's room; their windows share steps.
        allow_truncated: transcribe what is there of files that were cut off or damaged.
        options: fields of ``TranscribeOptions``.

    Raises:
        RequestError: an option is out of range, or the model does not support it.
    """
    width = min(together, transcriber.files_at_once(TranscribeOptions(**options)))

    def work(
        source: Source, report: Callable[[TranscriptEvent], None], cancel: CancelToken
    ) -> TranscriptEvent:
        try:
            return transcriber.follow(source, report, cancel, allow_truncated=allow_truncated, **options)
        except IngotError as error:
            if error.fields:  # an option's error is every recording's
                raise
            return error

    return run_concurrently(work, sources, width)


def recordings(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and the recordings in folders, sorted by name. And the other files in those folders: neither
    recordings by their suffix, nor transcripts, nor hidden. Raises ``RequestError`` if a folder has no
    recordings.
    """
    found: list[str] = []
    skipped: list[str] = []
    for name in names:
        if not Path(name).is_dir():
            found.append(name)
            continue
        files = sorted(path for path in Path(name).rglob("*") if path.is_file())
        inside = [path for path in files if path.suffix.lower() in SUFFIXES]
        if not inside:
            allowed = ", ".join(SUFFIXES)
            raise RequestError("the folder has no recordings", seen=name, allowed=allowed, field="files")
        found += map(str, inside)
        known = (*SUFFIXES, *(f".{format}" for format in WRITERS))
        skipped += [str(p) for p in files if p.suffix.lower() not in known and not p.name.startswith(".")]
    return found, skipped
