"""Ctrl-C and SIGTERM while a verb works."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def ends_once() -> Iterator[None]:
    """End the block at the first Ctrl-C (KeyboardInterrupt) or SIGTERM (exit code 143); ignore later ones, so
    that clean-up finishes. After a signal, the block ends with the interrupt and with nothing else: native
    code may replace its exception or drop it. One that was dropped is raised again by the next signal.
    """
    ending: list[BaseException] = []

    def end(number: int, frame: FrameType | None) -> None:
        if ending and sys.exc_info()[1] is not None:
            return  # clean-up is at work
        ending.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(_TERMINATED))
        raise ending[-1]

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        for each in before:
            signal.signal(each, end)
        yield
        if ending:
            raise ending[-1]
    except Exception:
        if ending:
            raise ending[-1] from None
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class StopOnInterrupt:
    """Within it, the first Ctrl-C only sets ``requested``; a second one interrupts."""

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
