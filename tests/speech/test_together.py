"""Threads that share steps: what they tell, in which order results come, and how all of it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from ingot.speech.batched_windows import CancelToken, run_concurrently, run_in_order

Tell = Callable[[int], None]


def until_set(left: CancelToken) -> None:
    end = time.monotonic() + 30
    while not left.is_set():
        assert time.monotonic() < end, "nobody said that it is over"
        time.sleep(0.001)


def test_all_that_is_reported_comes_with_its_position_and_the_result_last() -> None:
    def work(item: int, tell: Tell, left: CancelToken) -> str:
        for one in range(item):
            tell(one)
        return f"done {item}"

    found = list(run_concurrently(work, [3, 0, 2], width=2))
    for position, item in enumerate([3, 0, 2]):
        assert [one for at, one in found if at == position] == [*range(item), f"done {item}"]
    assert list(run_concurrently(work, [], width=4)) == []


@pytest.mark.parametrize("width", [1, 2, 5])
def test_results_come_in_order_from_so_many_threads(width: int) -> None:
    running, most, lock = 0, 0, threading.Lock()
    first, done = threading.Barrier(width), [threading.Event() for _ in range(5)]

    def work(item: int, left: CancelToken) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if item < width:  # all of these run at once, and the last of them is done first
            first.wait(30)
            assert item + 1 == width or done[item + 1].wait(30)
        with lock:
            running -= 1
        done[item].set()
        return item * item

    assert list(run_in_order(work, range(5), width)) == [0, 1, 4, 9, 16]
    assert most == width


def test_the_first_error_ends_all() -> None:
    begun: list[int] = []

    def work(item: int, left: CancelToken) -> int:
        begun.append(item)
        if item == 1:
            raise ValueError("the second")
        until_set(left)
        raise InterruptedError

    with pytest.raises(ValueError, match="the second"):
        list(run_in_order(work, range(9), width=2))
    assert sorted(begun) == [0, 1]


@pytest.mark.parametrize("outer", [False, True])
def test_who_leaves_ends_it(outer: bool) -> None:
    """By closing the generator, or because other work ends that it is a part of: then it says so."""
    outside, before = CancelToken(), threading.active_count()

    def work(item: int, tell: Tell, left: CancelToken) -> int:
        tell(item)
        until_set(left)
        raise InterruptedError

    found = run_concurrently(work, range(4), width=2, outer=outside)
    assert next(found)[1] in (0, 1)
    if outer:
        outside.set()
        with pytest.raises(InterruptedError):
            list(found)
    else:
        found.close()
    assert threading.active_count() == before


def test_a_part_that_ends_or_fails_ends_no_other_work() -> None:
    def part(item: int, left: CancelToken) -> int:
        if item == 3:
            raise ValueError
        return item

    def work(item: int, left: CancelToken) -> object:
        try:
            found: object = list(run_in_order(part, [item, item + 1], 2, left))
        except ValueError:
            found = None
        assert not left.is_set()
        return found

    assert list(run_in_order(work, [1, 2, 3, 4, 5], 1)) == [[1, 2], None, None, [4, 5], [5, 6]]
