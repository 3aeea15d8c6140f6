"""Recordings that a command line names, stdin among them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ingot.cli.terminal.console import print_error
from ingot.errors import IngotError, RequestError

STDIN = "-"
_MOST_NAMED = 10


def source_name(name: str, part: str = "name") -> str:
    """The name of a recording, or another ``part`` of its path."""
    return "stdin" if name == STDIN else str(getattr(Path(name), part))


def source_of(name: str) -> str | bytes:
    """A recording's file, or the bytes of stdin."""
    return sys.stdin.buffer.read() if name == STDIN else name


def tell_failure(name: str, error: IngotError) -> None:
    """Print what is wrong with one recording."""
    shown = None if error.seen == name else error.seen
    fix = None if error.fix is None else error.fix.replace("allow_truncated", "--allow-truncated")
    print_error(IngotError(f"{name}: {error.what}", seen=shown, allowed=error.allowed, fix=fix))


def tell_left_out(names: Sequence[str]) -> None:
    """Print which files of folders are not transcribed."""
    from ingot.audio.recording_samples import SUFFIXES

    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        seen, allowed = f"{', '.join(names[:_MOST_NAMED])}{more}", ", ".join(SUFFIXES)
        what, fix = "files of the folder are left out", "name the file itself, or move it"
        print_error(RequestError(what, seen=seen, allowed=allowed, fix=fix))
