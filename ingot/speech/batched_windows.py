"""Work on many recordings or chunks at once, in threads that share an engine's steps.

Owns the threads, what they tell on their way, the order of their results, and the end of all when one fails
or nobody reads on. Knows no speech.

    for position, one in told(work, files, width=16): ...       # as it comes
    for transcript in together(work, chunks, width=16): ...     # in order
"""

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
Said = TypeVar("Said")
Found = TypeVar("Found")


class Left:
    """Set once nobody waits for some work any more; work inside of other work ends with it, and alone."""

    def __init__(self, outer: Left | None = None) -> None:
        self._own, self._outer = Event(), outer

    def set(self) -> None:
        """Nobody waits."""
        self._own.set()

    def is_set(self) -> bool:
        return self._own.is_set() or (self._outer is not None and self._outer.is_set())


def told(
    work: Callable[[Item, Callable[[Said], None], Left], Found],
    items: Sequence[Item],
    width: int,
    outer: Left | None = None,
) -> Generator[tuple[int, Said | Found], None, None]:
    """What ``work`` tells of each item, and last what it makes of it, with the item's position, as it comes.
    The first error ends all; so does closing the generator.

    Args:
        work: given an item, whom to tell, and what is set once nobody waits for it any more.
        width: threads at most.
        outer: of the work that this is a part of.
    """
    left, rest = Left(outer), deque(enumerate(items))
    heard: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # a Future is the last of its item

    def tell(position: int, one: Said) -> None:
        heard.put((position, one))

    def take() -> None:
        while rest:
            try:
                position, item = rest.popleft()
            except IndexError:  # another thread was faster
                return
            ended: Future[Found] = Future()
            try:
                ended.set_result(work(item, partial(tell, position), left))
            except BaseException as error:  # goes on in the reader's thread
                ended.set_exception(error)
                rest.clear()
            heard.put((position, ended))
            if ended.exception() is not None:  # behind it in the queue are errors that follow from it
                left.set()

    # Nobody waits for them at the end of a program that has left a generator open.
    threads = [Thread(target=take, daemon=True) for _ in range(min(width, len(items)))]
    waiting = len(items)
    try:
        for thread in threads:
            thread.start()
        while waiting:
            position, found = heard.get()
            if isinstance(found, Future):
                waiting, found = waiting - 1, found.result()
            yield position, found
    finally:
        left.set()
        rest.clear()
        for thread in threads:
            thread.join()


def together(
    work: Callable[[Item, Left], Found], items: Sequence[Item], width: int, outer: Left | None = None
) -> Iterator[Found]:
    """What ``work`` makes of each item, in their order; arguments as of ``told``, but nothing is told."""
    early: dict[int, Found] = {}
    following = 0

    def quiet(item: Item, tell: Callable[[Found], None], left: Left) -> Found:
        return work(item, left)

    with closing(told(quiet, items, width, outer)) as results:
        for position, found in results:
            early[position] = found
            while following in early:
                yield early.pop(following)
                following += 1
