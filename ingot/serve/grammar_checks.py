"""Grammars of requests, tried in limited processes before an engine gets them."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

from ingot.config.grammar_spec import Grammar
from ingot.errors import RequestError
from ingot.sandbox.limited_process import LimitedProcess
from ingot.serve.api_errors import refused, stopping, too_busy, unavailable
from ingot.text.grammar.grammar_check import COMPILE_LIMITS, TrialDiedError, new_probe, try_grammar
from ingot.text.grammar.vocabulary import STATES_BYTES

_WORKERS = 2  # each has its own process, which may take seconds for a hostile grammar
_MOST_WAITING = 64
_MOST_KNOWN = 256
_SECONDS = 20.0
_MOST_BYTES = 768 << 20  # of the compiled grammars of all requests
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Trial:
    """A trial of a grammar; ``result``: its bytes, or why it is refused."""

    grammar: Grammar
    result: Future[int | RequestError] = field(init=False)
    waiters: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    probe: LimitedProcess | None = None  # while it is asked

    def may_pass_now(self) -> bool:
        """Whether the trial itself failed: the machine failed it, or its process died."""
        if not self.result.done():
            return False
        return self.result.exception() is not None or isinstance(self.result.result(), TrialDiedError)

    def abandon(self) -> None:
        self.cancelled.set()
        if not self.result.cancel():
            with self.lock:
                if self.probe is not None:
                    self.probe.interrupt()


class GrammarChecks:
    """For the event loop's thread; ``check`` waits for others."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
        self._all = [new_probe() for _ in range(_WORKERS)]
        self._probes: SimpleQueue[LimitedProcess] = SimpleQueue()
        for probe in self._all:
            self._probes.put(probe)
        self._closed = False
        self._known: OrderedDict[Grammar, _Trial] = OrderedDict()
        self._users: Counter[Grammar] = Counter()
        self._used = 0  # bytes

    async def check(self, grammar: Grammar, field: str | None) -> int:
        """The bytes of a grammar, from the request's ``field``. Results are kept, unless the trial itself
        failed. A trial is ended when nobody waits for it.

        Raises:
            ApiError: the grammar is refused (400), too many wait (429), it took too long to get a turn,
                the machine has no room for the trial, or the server is stopping (503).
        """
        trial = self._trial(grammar)
        trial.waiters += 1
        try:
            found = await self._result(trial)
        finally:
            trial.waiters -= 1
            if not trial.waiters and not trial.result.done():
                if self._known.get(grammar) is trial:
                    del self._known[grammar]
                trial.abandon()
        if isinstance(found, int):
            return found
        if self._closed:
            raise stopping()
        raise refused(found, field)

    @contextmanager
    def room(self, sizes: Mapping[Grammar, int]) -> Iterator[None]:
        """Room for the compiled grammars of a request; requests that share one take it once. Raises ApiError
        (503) where there is none now.
        """
        added = sum(sizes[one] + STATES_BYTES for one in sizes if one not in self._users)
        if self._users and self._used + added > _MOST_BYTES:
            text = f"the grammars of other requests take {self._used >> 20} MiB; try again later"
            raise unavailable(text, "grammars_busy")
        self._used += added
        self._users.update(sizes.keys())
        try:
            yield
        finally:
            for one in sizes:
                self._users[one] -= 1
                if not self._users[one]:
                    del self._users[one]
                    self._used -= sizes[one] + STATES_BYTES

    def close(self) -> None:
        """Take no more; running trials end."""
        self._closed = True
        self._pool.shutdown(wait=False)
        for probe in self._all:
            probe.end()

    async def _result(self, trial: _Trial) -> int | RequestError:
        """Wait for a trial, not for long."""
        try:
            async with asyncio.timeout(_SECONDS):
                return await asyncio.shield(asyncio.wrap_future(trial.result))  # others may wait for it, too
        except TimeoutError:
            seconds = self._waiting() * COMPILE_LIMITS.seconds / _WORKERS  # that trials before it may take
            text = "other grammars are still being checked; try again later"
            raise unavailable(text, "grammars_busy", max(1, math.ceil(seconds))) from None
        except (OSError, MemoryError):
            _log.exception("a grammar cannot be tried")
            text = "the grammar cannot be checked now; try again later"
            raise unavailable(text, "grammars_busy") from None

    def _waiting(self) -> int:
        return sum(not trial.result.done() for trial in self._known.values())

    def _trial(self, grammar: Grammar) -> _Trial:
        """The one trial of a grammar, running or done."""
        found = self._known.get(grammar)
        if found is None or found.may_pass_now():
            waiting = self._waiting()
            if waiting >= _MOST_WAITING:
                raise too_busy("the check of grammars", waiting)
            found = self._known[grammar] = _Trial(grammar)
            found.result = self._pool.submit(self._try, found)
        self._known.move_to_end(grammar)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return found

    def _try(self, trial: _Trial) -> int | RequestError:
        probe = self._probes.get()
        try:
            with trial.lock:
                trial.probe = probe
            return try_grammar(probe, trial.grammar, trial.cancelled)
        except RequestError as error:
            return error
        finally:
            with trial.lock:
                trial.probe = None
            self._probes.put(probe)
