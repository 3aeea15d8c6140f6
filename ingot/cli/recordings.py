"""Recordings that a command line names.

Owns stdin among them, what they are called, and what is told of one that cannot be used. Knows no verb.

    source_of("talk.mp3")
"""

from __future__ import annotations

import sys
from pathlib import Path

from ingot.cli.console import print_error
from ingot.errors import IngotError

STDIN = "-"


def source_name(name: str, part: str = "name") -> str:
    """What a recording is called, or, with ``stem``, its file."""
    return "stdin" if name == STDIN else str(getattr(Path(name), part))


def source_of(name: str) -> str | bytes:
    """A recording's file, or what stdin holds."""
    return sys.stdin.buffer.read() if name == STDIN else name


def tell_failure(name: str, error: IngotError) -> None:
    """What is wrong with one recording."""
    shown = None if error.seen == name else error.seen
    told = IngotError(f"{name}: {error.what}", seen=shown, allowed=error.allowed, fix=error.fix)
    print_error(told)
