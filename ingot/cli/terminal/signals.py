"""Ctrl-C and SIGTERM.

Covers what signals do while a verb works.

    with ends_once(): build(...)
    with StopOnInterrupt() as stop: ...; if stop.requested: break
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def ends_once() -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the block by an exception, and later ones not disturb its
    clean-up.

    SIGTERM exits with 143, as a process that it kills does; Ctrl-C raises KeyboardInterrupt. Native code may
    turn an exception that a signal raises inside it into one of its own: after a signal, any error is the
    interrupt.
    """
    ending: list[BaseException] = []

    def end(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        ending.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(_TERMINATED))
        raise ending[0]

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Exception:
        if ending:
            raise ending[0] from None
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class StopOnInterrupt:
    """While it is open the first Ctrl-C only sets ``requested``; a second one interrupts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
