"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """The place to write to, which becomes ``path`` when the block ends; on an error nothing changes. Raises
    ``OSError`` if the file cannot take its place.
    """
    part = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
