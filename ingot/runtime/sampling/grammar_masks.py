"""Masks of the tokens that requests' grammars allow next, found on other threads; a request sits out until
its own
is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ingot.errors import RequestError
from ingot.runtime.sampling.token_masks import TokenMasks
from ingot.runtime.scheduling.request import Request
from ingot.text.grammar.grammar_compiler import mask_words

Bits = npt.NDArray[np.int32]
_MOST_THREADS = 8


@dataclass(frozen=True)
class _Job:
    """The mask that follows the first ``length`` tokens of an answer."""

    length: int
    bits: Future[Bits]


class GrammarMasks:
    """Masks of the requests that have a matcher, one at a time for each.

    Args:
        table: takes the masks of a step.
        threads: where matchers are asked; None: threads of its own. A matcher releases Python's lock while it
            computes.
    """

    def __init__(self, table: TokenMasks, threads: Executor | None = None) -> None:
        self.table = table
        self._given = threads
        self._jobs: dict[str, _Job] = {}

    @property
    def num_held(self) -> int:
        """Requests of which something is kept."""
        return len(self._jobs)

    def begin(self, requests: Iterable[Request]) -> None:
        """Start finding what follows the tokens of each request that has a matcher and no pending token."""
        for request in requests:
            matcher, length = request.matcher, len(request.output_ids)
            if matcher is None or request.num_pending or request.ended:
                continue
            job = self._jobs.get(request.request_id)
            if job is None or job.length != length:
                # Nothing is appended to the ids until the mask has been used.
                bits = self._threads.submit(self._bits, request)
                self._jobs[request.request_id] = _Job(length, bits)

    def hold(self, requests: Sequence[Request], seconds: float | None) -> list[tuple[Request, RequestError]]:
        """Have requests with a matcher sit out until their mask is there. Waits up to ``seconds`` (None: to
        the end) for those that can be found; returns the requests that have none, and why.
        """
        self.begin(requests)
        known = [request for request in requests if not request.num_pending]
        wait([self._jobs[request.request_id].bits for request in known], seconds)
        failed = []
        for request in requests:
            bits = self._jobs[request.request_id].bits
            request.sits_out = request.num_pending > 0 or not bits.done()
            error = None if request.sits_out else bits.exception()
            if error is not None:  # the request's own, whatever it is: others go on
                failed.append((request, error if isinstance(error, RequestError) else _failed(error)))
        return failed

    def place(self, requests: Sequence[Request]) -> list[int]:
        """Send the masks of a step's requests, of which none sits out; returns each one's row of the table,
        -1 without a matcher.
        """
        masked = [i for i, request in enumerate(requests) if request.matcher is not None]
        jobs = [self._jobs[requests[i].request_id] for i in masked]
        for i, job in zip(masked, jobs, strict=True):
            assert job.bits.done(), "it sits out until its mask is there"
            assert job.length == len(requests[i].output_ids) + requests[i].num_pending
        self.table.send([job.bits.result() for job in jobs])
        places = [-1] * len(requests)
        for place, i in enumerate(masked):
            places[i] = place
        return places

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        self._jobs.pop(request.request_id, None)

    def _bits(self, request: Request) -> Bits:
        assert request.matcher is not None
        bits = np.empty(mask_words(self.table.vocab_size), np.int32)
        request.matcher.mask_into(bits, request.output_ids)
        return bits

    @cached_property
    def _threads(self) -> Executor:
        count = min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
        return self._given or ThreadPoolExecutor(count, "ingot-grammar")


def _failed(error: BaseException) -> RequestError:
    return RequestError("the grammar cannot go on", seen=f"{type(error).__name__}: {error}"[:200])
