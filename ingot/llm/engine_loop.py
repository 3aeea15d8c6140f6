"""The one thread that steps for every caller.

Orders go in by one queue, which any thread may fill, also from a finalizer, and run between two steps.
Results go out by a queue per caller. Nothing else is shared, so there is no lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ingot.errors import EngineError
from ingot.llm.active_requests import ActiveRequests, Call
from ingot.runtime.executor import Executor

Value = TypeVar("Value")
Orders = SimpleQueue[Callable[[], None] | None]


class ExecutorLoop:
    """Callers' side of an executor, for any thread; the loop's thread ends with it. Steps are taken while a
    call waits: a stream that nobody advances moves on beside the others, holds up none, and does not run by
    itself.
    """

    def __init__(self, executor: Executor) -> None:
        self._requests = ActiveRequests(executor)
        self._orders: Orders = SimpleQueue()
        self._thread = _LoopThread(self._orders, self._requests)
        self._thread.start()
        self._stop = weakref.finalize(self, _stop, self._orders, self._thread)

    def close(self) -> None:
        """End all calls with an error, and the thread; nothing can be started afterwards."""
        self._stop()

    def start(self, call: Call) -> None:
        self._order(partial(self._requests.start, call))

    def wait(self, call: Call) -> None:
        """Have steps taken until the call has news; does not block."""
        self._order(partial(self._requests.wait, call))

    def cancel(self, call: Call) -> None:
        """End a call, if it has not ended, before the next step; does not block."""
        self._orders.put(partial(self._requests.cancel, call))

    def end(self, call: Call) -> None:
        """``cancel``, and wait until it is done."""
        if not call.ended:
            self.settle(partial(self._requests.cancel, call))

    def between_steps(self, work: Callable[[], Value]) -> Value:
        """Run ``work`` in the loop's thread while no step runs; its value, or its error."""
        done: SimpleQueue[Any] = SimpleQueue()
        self._order(partial(_answer, work, done))
        value, error = done.get()
        if error is not None:
            raise error
        return value

    def settle(self, work: Callable[[], object]) -> None:
        """``between_steps`` for finalizers, which may run in the thread of a loop, which cannot wait for
        itself, or after the loop has ended.
        """
        if self._thread.is_alive() and not isinstance(threading.current_thread(), _LoopThread):
            self.between_steps(work)
        else:
            self._orders.put(partial(_answer, work, SimpleQueue()))

    @contextmanager
    def within(self, context: AbstractContextManager[Value]) -> Iterator[Value]:
        """Enter and leave a context between steps."""
        try:
            yield self.between_steps(context.__enter__)
        finally:
            self.settle(partial(context.__exit__, None, None, None))

    def _order(self, order: Callable[[], None]) -> None:
        if self._stop.alive and not self._thread.is_alive():
            raise EngineError("an LLM does not survive a fork of its process", fix="make it after the fork")
        self._orders.put(order)
        if not self._stop.alive:  # the thread may have ended before it came to this order
            raise EngineError("this LLM is closed", fix="make a new one")


class _LoopThread(threading.Thread):
    def __init__(self, orders: Orders, requests: ActiveRequests) -> None:
        super().__init__(name="ingot loop", daemon=True)
        self._orders = orders
        self._requests = requests

    def run(self) -> None:
        while self._obey():
            if self._requests.wanted:
                self._requests.step()
        self._requests.close()

    def _obey(self) -> bool:
        """Carry out all orders, waiting for one if no step is wanted; False: the loop ends."""
        block = not self._requests.wanted
        while True:
            try:
                order = self._orders.get(block)
            except Empty:
                return True
            if order is None:
                return False
            order()
            block = False


def _answer(work: Callable[[], object], done: SimpleQueue[Any]) -> None:
    try:
        done.put((work(), None))
    except BaseException as error:
        done.put((None, error))


def _stop(orders: Orders, thread: threading.Thread) -> None:
    """End a loop's thread; what it held is free then."""
    orders.put(None)
    if thread.is_alive() and not isinstance(threading.current_thread(), _LoopThread):
        thread.join()
