"""Runs work on many recordings or chunks at once, in threads that share an engine's steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

Item = TypeVar("Item")
Update = TypeVar("Update")
Result = TypeVar("Result")


class CancelToken:
    """Set to cancel work. Cancelling outer work cancels the inner work, too, but not the reverse."""

    def __init__(self, outer: CancelToken | None = None) -> None:
        self._own, self._outer = Event(), outer

    def set(self) -> None:
        """Cancel."""
        self._own.set()

    def is_set(self) -> bool:
        return self._own.is_set() or (self._outer is not None and self._outer.is_set())


def run_concurrently(
    work: Callable[[Item, Callable[[Update], None], CancelToken], Result],
    items: Sequence[Item],
    width: int,
    outer: CancelToken | None = None,
) -> Generator[tuple[int, Update | Result], None, None]:
    """Updates of ``work`` for each item, then its result, as they come, each with the item's position.
    The first error cancels all; so does closing the generator.

    Args:
        work: takes an item, a function that reports updates, and a cancel token.
        width: most threads.
        outer: the token of the enclosing work.
    """
    cancel, rest = CancelToken(outer), deque(enumerate(items))
    updates: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # a Future is the last of its item

    def report(position: int, one: Update) -> None:
        updates.put((position, one))

    def take() -> None:
        while rest:
            try:
                position, item = rest.popleft()
            except IndexError:  # another thread was faster
                return
            ended: Future[Result] = Future()
            try:
                ended.set_result(work(item, partial(report, position), cancel))
            except BaseException as error:  # raised in the reader's thread
                ended.set_exception(error)
                rest.clear()
            updates.put((position, ended))
            if ended.exception() is not None:  # errors that follow from it come later in the queue
                cancel.set()

    # Daemons, so that a program that has left a generator open can end.
    threads = [Thread(target=take, daemon=True) for _ in range(min(width, len(items)))]
    waiting = len(items)
    try:
        for thread in threads:
            thread.start()
        while waiting:
            position, found = updates.get()
            if isinstance(found, Future):
                waiting, found = waiting - 1, found.result()
            yield position, found
    finally:
        cancel.set()
        rest.clear()
        for thread in threads:
            thread.join()


def run_in_order(
    work: Callable[[Item, CancelToken], Result],
    items: Sequence[Item],
    width: int,
    outer: CancelToken | None = None,
) -> Iterator[Result]:
    """Results of ``work`` in the order of the items; arguments as for ``run_concurrently``, no updates."""
    early: dict[int, Result] = {}
    following = 0

    def quiet(item: Item, report: Callable[[Result], None], cancel: CancelToken) -> Result:
        return work(item, cancel)

    with closing(run_concurrently(quiet, items, width, outer)) as results:
        for position, found in results:
            early[position] = found
            while following in early:
                yield early.pop(following)
                following += 1
