"""Grammars that an engine compiles in threads while it decodes.

llguidance releases Python's lock while it compiles, so steps keep their pace.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ingot.config.sampling_params import SamplingParams
from ingot.errors import IngotError
from ingot.serve.engine_calls.process_protocol import Add
from ingot.text.grammar.grammar_compiler import GrammarMatcher, Grammars

_THREADS = 2  # one slow grammar holds up no other


@dataclass(frozen=True)
class Compiled:
    """A request with its values and its grammar's matcher, or the error that refuses it."""

    add: Add
    result: tuple[SamplingParams, GrammarMatcher | None] | IngotError


class Compiling:
    """Requests whose grammars are being compiled; for the loop's thread. It holds no more than the server
    lets in (``EngineClient.places``). ``wake`` is called by another thread when something has finished.
    """

    def __init__(self, grammars: Grammars, stop_ids: frozenset[int], wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._stop_ids = stop_ids
        self._wake = wake
        self._waiting: set[str] = set()
        self._asked: OrderedDict[str, Add] = OrderedDict()  # no thread has begun with these
        self._more = threading.Condition()  # of _asked
        self._found: SimpleQueue[Compiled] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, add: Add) -> None:
        if not self._threads:
            self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_THREADS)]
            for thread in self._threads:
                thread.start()
        self._waiting.add(add.id)
        with self._more:
            self._asked[add.id] = add
            self._more.notify()

    def forget(self, name: str) -> None:
        """Drop a request that was ended."""
        self._waiting.discard(name)
        with self._more:
            self._asked.pop(name, None)

    def finished(self) -> list[Compiled]:
        """Requests that have finished since the last call."""
        found: list[Compiled] = []
        while True:
            try:
                one = self._found.get_nowait()
            except Empty:
                return found
            if one.add.id in self._waiting:
                self._waiting.discard(one.add.id)
                found.append(one)

    def _run(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._asked)
                _, add = self._asked.popitem(last=False)
            try:
                params = SamplingParams.from_json(add.params)
                matcher = self._grammars.prepare(params, self._stop_ids, tried=add.grammar_bytes)
                self._found.put(Compiled(add, (params, matcher)))
            except IngotError as error:
                self._found.put(Compiled(add, error))
            except BaseException as error:  # a panic of the library, too: the thread serves others
                text = f"the grammar cannot be compiled: {type(error).__name__}: {error}"
                self._found.put(Compiled(add, IngotError(text)))
            self._wake()
