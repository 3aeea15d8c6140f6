"""Grammars compiled beside the steps of an engine's process.

Owns one thread and the requests that wait for it: a large schema takes tens of milliseconds, a bad one
seconds, and steps of other requests must not wait. Knows no step and no socket.

    compiling = Compiling(executor.admission, link.wake)
    compiling.begin(message, params)
    for message, error in compiling.done(): ...
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ingot.config.sampling import SamplingParams
from ingot.errors import IngotError
from ingot.runtime.admission import Admission
from ingot.serve.protocol import Add


class Compiling:
    """Requests whose grammars are being compiled, first come, first served.

    Args:
        wake: called from the thread when one is done.
    """

    def __init__(self, admission: Admission, wake: Callable[[], None]) -> None:
        self._admission = admission
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._open: dict[str, tuple[Add, Future[None]]] = {}

    def begin(self, message: Add, params: SamplingParams) -> None:
        """Compile the grammar of a request, which the executor then finds compiled."""
        assert self._admission.grammars is not None, "an executor has grammars"
        check = self._admission.grammars.check
        found = self._thread.submit(check, params, self._admission.stop_ids)
        self._open[message.id] = message, found
        found.add_done_callback(lambda _: self._wake())

    def drop(self, name: str) -> None:
        """Forget a request; an unknown one is ignored."""
        _, found = self._open.pop(name, (None, None))
        if found is not None:
            found.cancel()

    def done(self) -> list[tuple[Add, IngotError | None]]:
        """Requests that can go on, each once, and why one cannot.

        Raises:
            BaseException: compiling failed by a bug.
        """
        ready = [name for name, (_, found) in self._open.items() if found.done()]
        told: list[tuple[Add, IngotError | None]] = []
        for name in ready:
            message, found = self._open.pop(name)
            error = found.exception()
            if error is not None and not isinstance(error, IngotError):
                raise error
            told.append((message, error))
        return told
