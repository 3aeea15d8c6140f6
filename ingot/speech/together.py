"""Many recordings or chunks at once, in threads that share an engine's steps.

Owns the order of their results, and the end of all when one fails. Knows no speech.

    for transcript in together(work, files, width=16): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def together(
    work: Callable[[Item, Event], Found], items: Sequence[Item], width: int, left: Event | None = None
) -> Iterator[Found]:
    """What ``work`` makes of each item, in their order; the first error of any ends all.

    Args:
        work: given an item and what tells that nobody waits for it any more.
        width: threads at most.
        left: set by a caller who no longer waits, and here when the work ends early.
    """
    left = left or Event()
    errors: list[BaseException] = []

    def guarded(item: Item) -> Found:
        try:
            return work(item, left)
        except BaseException as error:
            errors.append(error)
            left.set()
            raise

    with ThreadPoolExecutor(max(1, min(width, len(items)))) as pool:
        futures = [pool.submit(guarded, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        except BaseException as error:
            first = errors[0] if errors else error  # the others end because of it
            left.set()
            pool.shutdown(cancel_futures=True)
            raise first from None
