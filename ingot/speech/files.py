"""Many recordings, one after another or several at once.

Owns the order of work over files, so that what is wrong with one does not end the others, and the folders
that recordings lie in. Knows no format of transcripts.

    for position, told in transcribe_each(transcriber, ["a.wav", "b.flac"], together=2): ...
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

from ingot.errors import IngotError, RequestError
from ingot.processors.audio import SUFFIXES
from ingot.speech.options import TranscribeOptions
from ingot.speech.recording import Transcript
from ingot.speech.segments import Segment
from ingot.speech.transcriber import Source, Transcriber

Told = Segment | Transcript | IngotError
_Queue = SimpleQueue[tuple[int, Told | BaseException]]


def transcribe_each(
    transcriber: Transcriber, sources: Sequence[Source], together: int = 1, **options: Any
) -> Generator[tuple[int, Told], None, None]:
    """Segments of recordings as they are known, each with its recording's position, then its transcript, or
    what is wrong with it. Closing the generator ends the work.

    Args:
        together: recordings at once; their windows share steps.
        options: fields of ``TranscribeOptions``.

    Raises:
        RequestError: an option is out of range, or the model cannot do what it asks.
    """
    TranscribeOptions(**options)
    told: _Queue = SimpleQueue()
    left = Event()
    with ThreadPoolExecutor(max(1, together)) as pool:
        try:
            for position, source in enumerate(sources):
                pool.submit(_one, transcriber, source, position, options, told, left)
            waiting = len(sources)
            while waiting:
                position, found = told.get()
                if isinstance(found, IngotError) and found.flag is not None:
                    raise found  # of the options, and so of every recording
                if not isinstance(found, Segment | Transcript | IngotError):
                    raise found
                waiting -= not isinstance(found, Segment)
                yield position, found
        finally:
            left.set()
            pool.shutdown(cancel_futures=True)


def _one(
    transcriber: Transcriber,
    source: Source,
    position: int,
    options: dict[str, Any],
    told: _Queue,
    left: Event,
) -> None:
    """Work of a thread: everything that there is to tell of one recording."""
    try:
        found = transcriber.follow(source, lambda one: told.put((position, one)), left, **options)
        told.put((position, found))
    except BaseException as error:  # goes on in the reader's thread
        told.put((position, error))


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
