"""A folder that appears complete or not at all: lock, space check, temporary folder, final rename."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ingot.engine.manifest import is_engine
from ingot.errors import BuildError

_MARK = ".ingot-build-"
_LOCK = ".ingot-lock-"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of a file system; the last check then tells


@dataclass(frozen=True)
class FolderKind:
    """What is built.

    Attributes:
        name: its word in errors, and ``one`` with its article.
        recognised: whether a folder is one, which ``force`` may replace.
    """

    name: str
    one: str
    recognised: Callable[[Path], bool]


ENGINE = FolderKind("engine", "an engine", is_engine)


@contextmanager
def staged_folder(target: Path, *, force: bool, size: int, kind: FolderKind = ENGINE) -> Iterator[Path]:
    """Yield an empty folder; on success it becomes ``target``, on any error or interrupt it is removed.

    Args:
        force: replace what is at ``target`` where it is of this kind; anything else is never replaced.
        size: bytes that will be written, checked against the free space first.

    Raises:
        BuildError: the target is taken, or being built by another process, cannot be written, or the disk
            lacks the space.
    """
    target = target.resolve()  # a link to an engine stays a link
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(error) from None
    with _alone(target, kind):
        _prepare(target, force, size, kind)
        folder = parent / f"{_MARK}{target.name}-{os.getpid()}"
        old = folder.with_name(folder.name + "-old")
        try:
            try:
                folder.mkdir()
            except OSError as error:
                raise _not_writable(error) from None
            yield folder
            _check_target(target, force, kind)  # a machine whose locks are not seen here may have built it
            if target.exists():
                target.rename(old)
            folder.rename(target)
        finally:  # an engine that was moved aside returns unless it was replaced, and nothing else stays
            if old.exists() and not target.exists():
                old.rename(target)
            for left in (folder, old):
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _alone(target: Path, kind: FolderKind) -> Iterator[None]:
    """Hold the lock of a target; a killed process releases it."""
    path = target.with_name(_LOCK + target.name)
    try:
        file = _locked(path)
    except BlockingIOError:
        raise BuildError(
            f"another build of this {kind.name} is under way",
            seen=target,
            fix="wait until it ends, or choose another -o",
        ) from None
    except OSError as error:
        raise _not_writable(error) from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(file)


def _locked(path: Path) -> int:
    """The open and locked file; its former owner may have removed it between the two."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return file
            os.close(file)
            raise
        os.close(file)


def _prepare(target: Path, force: bool, size: int, kind: FolderKind) -> None:
    """Clean up after killed builds of this target, and refuse what cannot succeed."""
    try:
        own = re.compile(re.escape(f"{_MARK}{target.name}-") + r"(\d+)(-old)?")
        for folder in list(target.parent.iterdir()):
            match = own.fullmatch(folder.name)
            if match is None or Path("/proc", match[1]).exists():
                continue
            if match[2] and not target.exists():
                folder.rename(target)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        _check_target(target, force, kind)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise _not_writable(error) from None
    if free < size:
        raise BuildError(
            f"not enough disk space for the {kind.name}",
            seen=f"{free / 1e9:.2f} GB free in {target.parent}",
            allowed=f"at least {size / 1e9:.2f} GB",
            fix="free space or choose another -o",
        )


def _not_writable(error: OSError) -> BuildError:
    return BuildError("cannot write to the target's folder", seen=error, fix="-o")


def _check_target(target: Path, force: bool, kind: FolderKind) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    if not kind.recognised(target):
        raise BuildError(
            f"the target exists and is not {kind.one}",
            seen=target,
            fix="choose another folder; `force=True` does not replace it",
        )
    if not force:
        raise BuildError(
            f"the {kind.name} exists",
            seen=target,
            field="force",
            fix="`force=True` replaces it, or choose another folder",
        )


@contextmanager
def new_parents(target: Path) -> Iterator[None]:
    """On an error, the created folders above the target are removed again."""
    missing = [folder for folder in target.absolute().parents if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise
