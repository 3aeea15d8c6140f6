"""Where Triton keeps built kernels for later starts: its own folder, or a temporary one in its place."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from triton import knobs

from ingot.errors import DeviceError
from ingot.version import VERSION, version_of

_log = logging.getLogger(__name__)
_LEAST_FREE = 256 << 20  # bytes; a 7B's kernels take less
_CHANGING = ("TRITON_DEBUG", "TRITON_DISABLE_LINE_INFO", "TRITON_DEFAULT_FP_FUSION", "TRITON_OVERRIDE_ARCH")
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


class StartNote:
    """A file beside built kernels that names them: a start with these values has launched every kernel that
    it needs, so that a later one need not look for missing ones. Other versions and other code have other
    files.

    Args:
        values: what the kernels depend on beside code, as text: card, sizes, plan.
    """

    def __init__(self, *values: str) -> None:
        find_kernel_folder()
        packages = [version_of(name) or "" for name in ("torch", "triton")]
        knobs_set = sorted(f"{name}={value}" for name, value in os.environ.items() if name in _CHANGING)
        parts = json.dumps([VERSION, *packages, *knobs_set, code_seen(), *values])
        name = hashlib.sha256(parts.encode()).hexdigest()
        self._file = Path(knobs.cache.dir) / "ingot-starts" / name

    def exists(self) -> bool:
        """Whether there is a note, and no file is missing of the kernels that it names; False also where they
        may not be read.
        """
        try:
            counts = json.loads(self._file.read_text(encoding="utf-8"))
            return all(_files_in(name) >= count for name, count in counts.items())
        except (OSError, ValueError, TypeError, AttributeError):  # no note, or what is none
            return False

    def write(self, kernels: Iterable[str]) -> None:
        """Where the folder takes no file, later starts look for missing kernels again.

        Args:
            kernels: names of the folders of those that the start may launch; some may not have been built.
        """
        with contextlib.suppress(OSError):
            counts = {name: _files_in(name) for name in sorted(kernels)}
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text(json.dumps({name: n for name, n in counts.items() if n}), encoding="utf-8")


def _files_in(kernel: str) -> int:
    """Number of files of a kernel; 0 where it is not built."""
    try:
        return len(os.listdir(Path(knobs.cache.dir) / kernel))
    except OSError:
        return 0


@functools.cache
def code_seen() -> str:
    """Name, size and time of each of the package's files."""
    root, found = Path(__file__).parents[1], []
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".py"):
                with contextlib.suppress(OSError):  # a link to nothing, as editors leave them
                    file = Path(folder, name).stat()
                    found.append((str(Path(folder, name).relative_to(root)), file.st_size, file.st_mtime_ns))
    return json.dumps(sorted(found))


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
