"""Where Triton keeps built kernels for later starts: its own folder, or a temporary one in its place."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path

from triton import knobs

from ingot.errors import DeviceError

_log = logging.getLogger(__name__)
_LEAST_FREE = 256 << 20  # bytes; a 7B's kernels take less
_FIX = "set TRITON_CACHE_DIR to another folder"


@functools.cache
def find_kernel_folder() -> None:
    """Once a process: where Triton's folder cannot be written to, is nearly full or runs no programs, log a
    warning and have Triton use a temporary one, in which it also finds what the first one holds.

    Raises:
        DeviceError: no temporary folder can be used either.
    """
    folder = Path(knobs.cache.dir)
    trouble = trouble_with(folder)
    if trouble is None:
        return
    for parent in (tempfile.gettempdir(), "/var/tmp", "/dev/shm", str(Path.cwd())):
        if trouble_with(Path(parent)) is None:
            _log.warning("built kernels are not kept: %s: %s; %s", folder, trouble, _FIX)
            knobs.cache.dir = _temporary(folder, parent)
            return
    raise DeviceError("built kernels have no place", seen=f"{folder}: {trouble}", fix=_FIX)


def trouble_with(folder: Path) -> str | None:
    """Why kernels cannot be kept in a folder, which is made where there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        disk = os.statvfs(folder)
    except OSError as error:
        return error.strerror or str(error)
    if disk.f_flag & os.ST_NOEXEC:
        return "its file system is mounted with noexec"
    free = disk.f_bavail * disk.f_frsize
    return None if free >= _LEAST_FREE else f"{free >> 20} MiB are free, of at least {_LEAST_FREE >> 20}"


_temporary_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def _temporary(folder: Path, parent: str) -> str:
    """A new folder that links to each entry of ``folder``."""
    made = tempfile.TemporaryDirectory(prefix="ingot-kernels-", dir=parent)
    _temporary_folders.append(made)
    try:
        for entry in folder.iterdir():
            (Path(made.name) / entry.name).symlink_to(entry.absolute())
    except OSError:  # it cannot be read, or is no folder
        pass
    return made.name
