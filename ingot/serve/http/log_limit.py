"""A log that strangers cannot fill: what repeats is counted after a few lines."""

from __future__ import annotations

import logging
import time

_LINES = 5  # of each place in the code
_SECONDS = 60.0


class RepeatLimit(logging.Filter):
    """Lets each place in the code write a few lines per minute; the first line afterwards says how many were
    dropped.
    """

    def __init__(self, lines: int = _LINES, seconds: float = _SECONDS) -> None:
        super().__init__()
        self._lines, self._seconds = lines, seconds
        self._places: dict[tuple[str, str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place = record.name, record.pathname, record.lineno
        start, count = self._places.get(place, (float("-inf"), 0))
        now = time.monotonic()
        if now - start < self._seconds:
            self._places[place] = start, count + 1
            return count < self._lines
        self._places[place] = now, 1
        if count > self._lines:
            record.msg = f"{record.getMessage()} ({count - self._lines} more like this were not logged)"
            record.args = ()
        return True


def limit_log() -> None:
    """Limit what goes to stderr where no log is set up."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(RepeatLimit())
