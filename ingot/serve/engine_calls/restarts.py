"""When an engine whose process died is started again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ingot.engine.manifest import MANIFEST_FILE, is_engine


@dataclass(frozen=True)
class RestartPolicy:
    """Waits that double, up to a number of failures in a row.

    Attributes:
        first_seconds, most_seconds: the first wait and the longest one.
        most_failures: deaths and failed starts in a row, after which the engine is given up.
        stable_seconds: failures count anew after an engine has run for this long.
    """

    first_seconds: float = 1.0
    most_seconds: float = 30.0
    most_failures: int = 8
    stable_seconds: float = 60.0

    def delay(self, failures: int) -> float | None:
        """Seconds to wait after this many failures in a row; None: the engine is given up."""
        if failures >= self.most_failures:
            return None
        return min(self.most_seconds, self.first_seconds * 2.0 ** (failures - 1))


def folder_stamp(folder: Path) -> str:
    """A hash that changes when another engine or checkpoint is put in a folder, or a YAML that names one is
    written. Raises OSError.
    """
    if is_engine(folder):
        return hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()
    files = sorted(
        (one.name, one.stat().st_size, one.stat().st_mtime_ns)
        for one in (folder.iterdir() if folder.is_dir() else [folder])
    )
    return hashlib.sha256(repr(files).encode()).hexdigest()
