"""The order in which waiting requests enter the batch: preempted ones first, then by submission.

Long prompts that wait for a turn stand aside, and others pass them; in its turn one comes before all but the
preempted.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain, count

from ingot.runtime.scheduling.request import Request


class WaitingLine:
    """Requests that hold no blocks and have no place in the batch, in the order in which they may enter."""

    def __init__(self) -> None:
        self._back: deque[Request] = deque()  # preempted, the oldest first
        self._aside: list[Request] = []  # by arrival
        self._line: deque[Request] = deque()
        self._arrivals = count(1)

    def __len__(self) -> int:
        return len(self._back) + len(self._aside) + len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._back, self._aside, self._line)

    def add(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        self._line.append(request)

    def put_back(self, request: Request) -> None:
        """Put a preempted one to the front: those preempted after it were in the batch before it."""
        self._back.appendleft(request)

    def first(self, *, turn: bool) -> Request | None:
        """The next one; of those aside only where it is their ``turn``."""
        for line in (self._back, self._aside if turn else (), self._line):
            if line:
                return line[0]
        return None

    def set_aside(self, request: Request) -> None:
        """Have a long prompt wait for its turn, after those that were submitted before it."""
        self.remove(request)
        insort(self._aside, request, key=lambda one: one.arrival)

    def remove(self, request: Request) -> None:
        """Remove one; at once if it is first."""
        lines = (self._back, self._aside, self._line)
        first = (line for line in lines if line and line[0] is request)
        line = next(first, None) or next(line for line in lines if request in line)
        line.remove(request)
