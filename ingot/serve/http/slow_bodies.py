"""Requests whose bodies are still arriving, and which of them makes room for others.

Clients that send a byte at a time would otherwise keep everybody out for as long as a body may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ingot.serve.api_errors import ApiError

SLOW_SECONDS = 5.0  # a body has at least these


class SlowBodies:
    """Requests under one bound whose bodies are arriving; for the event loop's thread."""

    def __init__(self) -> None:
        self._arriving: dict[asyncio.Task[Any], float] = {}  # since when, oldest first
        self._ended: set[asyncio.Task[Any]] = set()

    @contextmanager
    def arriving(self) -> Iterator[Callable[[], None]]:
        """While the current task handles a request; what it yields is called when the body is complete.
        Raises ApiError where the request made room for another.
        """
        task = asyncio.current_task()
        assert task is not None
        self._arriving[task] = asyncio.get_running_loop().time()
        try:
            yield lambda: self._complete(task)
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            text = "the body arrived too slowly, and others wait; try again later"
            raise ApiError(408, text, code="request_timeout", headers={"Connection": "close"}) from None
        finally:
            self._complete(task)
            self._ended.discard(task)

    def make_room(self) -> bool:
        """End the request whose body has been arriving longest; False where none has taken too long."""
        oldest = next(iter(self._arriving.items()), None)
        if oldest is None or asyncio.get_running_loop().time() - oldest[1] < SLOW_SECONDS:
            return False
        task, _ = oldest
        self._complete(task)
        self._ended.add(task)
        task.cancel()
        return True

    def _complete(self, task: asyncio.Task[Any]) -> None:
        self._arriving.pop(task, None)
