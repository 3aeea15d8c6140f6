"""A random but reproducible grammar: after each output it allows some of the vocabulary.

FakeMatcher(vocab_size=23, seed=1).mask_into(bits, output_ids)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.errors import RequestError
from ingot.text.grammar.grammar_compiler import GrammarMatcher, mask_words


class FakeMatcher(GrammarMatcher):
    """Allows a quarter of the tokens, or of the seed's own after ``dead_end`` tokens none. Some answers take
    ``seconds``.
    """

    def __init__(self, vocab_size: int, seed: int, seconds: float = 0.0, dead_end: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._seconds = seconds
        self._dead_end = dead_end
        self._seen: list[int] = []

    def allowed(self, output_ids: Sequence[int]) -> list[int]:
        """Ids that may follow."""
        chance = random.Random(f"{self._seed} {list(output_ids)}")
        return sorted(chance.sample(range(self._vocab_size), max(self._vocab_size // 4, 1)))

    def mask_into(self, bits: npt.NDArray[np.int32], output_ids: Sequence[int]) -> None:
        assert self._seen == list(output_ids[: len(self._seen)]), "a matcher is of one answer"
        self._seen = list(output_ids)
        if self._seconds and (len(output_ids) + self._seed) % 3 == 0:
            time.sleep(self._seconds)
        if self._dead_end is not None and len(output_ids) >= self._dead_end:
            raise RequestError(f"nothing continues the grammar after {len(output_ids)} tokens")
        flags = np.zeros(32 * mask_words(self._vocab_size), np.uint8)
        flags[self.allowed(output_ids)] = 1
        bits[:] = np.packbits(flags, bitorder="little").view(np.int32)

    def may_end(self, output_ids: Sequence[int]) -> bool:
        return True

    def copy(self) -> FakeMatcher:
        made = FakeMatcher(self._vocab_size, self._seed, self._seconds, self._dead_end)
        made._seen = list(self._seen)
        return made


class AtOnce(Executor):
    """Threads that have done their work before anyone asks."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class Later(Executor):
    """Threads that work when ``work`` is called."""

    def __init__(self) -> None:
        self._left: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self._left.append((done, lambda: fn(*args, **kwargs)))
        return done

    def work(self) -> None:
        """Do all that was asked for."""
        for done, act in self._left:
            done.set_result(act())
        self._left.clear()
