"""Grammars of requests, tried before an engine hears of them.

Owns the threads and processes in which they are compiled, off the event loop, and the bounds on these: how
many wait, and how long. Knows no engine and no vocabulary.

    await checks.check(params.grammar, "response_format")
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from ingot.config.grammar import Grammar
from ingot.errors import RequestError
from ingot.processors.limited_process import LimitedProcess
from ingot.serve.errors import refused, stopping, too_busy, unavailable
from ingot.structured.grammar_check import TrialDiedError, new_probe, try_grammar

_WORKERS = 2  # each asks a process of its own, which may take seconds for a hostile grammar
_MOST_WAITING = 64
_MOST_KNOWN = 256
_SECONDS = 20.0
_log = logging.getLogger(__name__)


class GrammarChecks:
    """For the event loop's thread; ``check`` waits for others."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
        self._all = [new_probe() for _ in range(_WORKERS)]
        self._probes: SimpleQueue[LimitedProcess] = SimpleQueue()
        for probe in self._all:
            self._probes.put(probe)
        self._closed = False
        self._known: OrderedDict[Grammar, Future[RequestError | None]] = OrderedDict()

    async def check(self, grammar: Grammar, field: str | None) -> None:
        """Refuse a grammar that cannot be compiled; what has been tried once is known, unless the trial
        itself failed.

        Args:
            field: of the request, in which the grammar is.

        Raises:
            ApiError: the grammar is refused (400), too many wait (429), it took too long to get a turn,
                the machine has no room for the trial, or the server is stopping (503).
        """
        trial = asyncio.wrap_future(self._trial(grammar))
        try:
            async with asyncio.timeout(_SECONDS):
                error = await asyncio.shield(trial)  # others may wait for the same trial
        except TimeoutError:
            text = "other grammars are still being checked; try again later"
            raise unavailable(text, "grammars_busy") from None
        except (OSError, MemoryError):
            _log.exception("a grammar cannot be tried")
            text = "the grammar cannot be checked now; try again later"
            raise unavailable(text, "grammars_busy") from None
        if error is not None and self._closed:
            raise stopping()
        if error is not None:
            found = refused(error)
            found.param = field
            raise found

    def close(self) -> None:
        """Take no more; a trial under way ends."""
        self._closed = True
        self._pool.shutdown(wait=False)
        for probe in self._all:
            probe.end()

    def _trial(self, grammar: Grammar) -> Future[RequestError | None]:
        """The one trial of a grammar, under way or done."""
        found = self._known.get(grammar)
        if found is None or _may_pass_now(found):
            waiting = sum(not trial.done() for trial in self._known.values())
            if waiting >= _MOST_WAITING:
                raise too_busy("the check of grammars", waiting)
            found = self._known[grammar] = self._pool.submit(self._try, grammar)
        self._known.move_to_end(grammar)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return found

    def _try(self, grammar: Grammar) -> RequestError | None:
        probe = self._probes.get()
        try:
            try_grammar(probe, grammar)
        except RequestError as error:
            return error
        finally:
            self._probes.put(probe)
        return None


def _may_pass_now(trial: Future[RequestError | None]) -> bool:
    """Whether a trial says nothing of its grammar: the machine failed it, or its process died."""
    if not trial.done():
        return False
    return trial.exception() is not None or isinstance(trial.result(), TrialDiedError)
