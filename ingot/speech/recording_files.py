"""Many recordings, one after another or several at once.

Covers the order of work over files, so that what is wrong with one does not end the others, and the folders
that recordings lie in.

    for position, event in transcribe_each(transcriber, ["a.wav", "b.flac"], together=2): ...
"""

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
    """Segments of recordings as they are known, each with its recording's position, then its transcript, or
    what is wrong with it. Closing the generator ends the work.

    Args:
        together: recordings at once, as many as the engine has room for; their windows share steps.
        allow_truncated: transcribe what is there of files that were cut off or damaged.
        options: fields of ``TranscribeOptions``.

    Raises:
        RequestError: an option is out of range, or the model cannot do what it asks.
    """
    width = min(together, transcriber.files_at_once(TranscribeOptions(**options)))

    def work(
        source: Source, report: Callable[[TranscriptEvent], None], cancel: CancelToken
    ) -> TranscriptEvent:
        try:
            return transcriber.follow(source, report, cancel, allow_truncated=allow_truncated, **options)
        except IngotError as error:
            if error.fields:  # of the options, and so of every recording
                raise
            return error

    return run_concurrently(work, sources, width)


def recordings(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that names stand for: themselves, and of a folder its recordings in the order of their names.
    And what else is in the folders: neither a recording by its ending, nor a transcript, nor hidden.

    Raises:
        RequestError: a folder has no recordings.
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
