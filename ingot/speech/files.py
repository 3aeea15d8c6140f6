"""Many recordings, one after another or several at once.

Owns the order of work over files, so that what is wrong with one does not end the others, and the folders
that recordings lie in. Knows no format of transcripts.

    for position, told in transcribe_each(transcriber, ["a.wav", "b.flac"], together=2): ...
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from ingot.errors import IngotError, RequestError
from ingot.processors.audio import SUFFIXES
from ingot.speech.options import TranscribeOptions
from ingot.speech.recording import Transcript
from ingot.speech.segments import Segment
from ingot.speech.together import Left, told
from ingot.speech.transcriber import Source, Transcriber

Told = Segment | Transcript | IngotError


def transcribe_each(
    transcriber: Transcriber, sources: Sequence[Source], together: int = 1, **options: Any
) -> Generator[tuple[int, Told], None, None]:
    """Segments of recordings as they are known, each with its recording's position, then its transcript, or
    what is wrong with it. Closing the generator ends the work.

    Args:
        together: recordings at once, as many as the engine has room for; their windows share steps.
        options: fields of ``TranscribeOptions``.

    Raises:
        RequestError: an option is out of range, or the model cannot do what it asks.
    """
    width = min(together, transcriber.files_at_once(TranscribeOptions(**options)))

    def work(source: Source, heard: Callable[[Told], None], left: Left) -> Told:
        try:
            return transcriber.follow(source, heard, left, **options)
        except IngotError as error:
            if error.flag is not None:  # of the options, and so of every recording
                raise
            return error

    return told(work, sources, width)


def recordings(names: Sequence[str]) -> list[str]:
    """The files that names stand for: themselves, and of a folder its recordings in the order of their names.

    Raises:
        RequestError: a folder has no recordings.
    """
    found: list[str] = []
    for name in names:
        if not Path(name).is_dir():
            found.append(name)
            continue
        inside = sorted(path for path in Path(name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not inside:
            allowed = ", ".join(SUFFIXES)
            raise RequestError("the folder has no recordings", seen=name, allowed=allowed, flag="FILE")
        found += map(str, inside)
    return found
