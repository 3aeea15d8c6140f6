"""Masks of the tokens that requests' grammars allow next, found on other threads; a request sits out until
its own is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ingot.control_groups import usable_processors
from ingot.errors import RequestError
from ingot.runtime.scheduling.request import Request
from ingot.text.grammar.grammar_compiler import mask_words

Bits = npt.NDArray[np.int32]
_MOST_THREADS = 8


class _MasksSide(NamedTuple):
    """Masks on the host, and the event after which they may be written again."""

    masks: torch.Tensor
    sent: torch.cuda.Event | None


class TokenMasks:
    """Room for the masks of ``max_rows`` rows; two pinned host buffers are used in turn."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._shape = (max_rows, mask_words(vocab_size))
        self._device = device
        self._turn = 0

    @cached_property
    def table(self) -> torch.Tensor:
        """[max_rows, ceil(V / 32)] int32; made at first use, then at one address, since graphs hold it."""
        with torch.inference_mode(mode=False):  # it outlives the step that asks first
            return torch.zeros(self._shape, dtype=torch.int32, device=self._device)

    def send(self, masks: Sequence[npt.NDArray[np.int32]]) -> None:
        """Make them the first rows of the table for the steps that are sent from now on."""
        if not masks:
            return
        self._turn = 1 - self._turn
        side = self._sides[self._turn]
        if side.sent is not None:
            side.sent.synchronize()
        np.stack(masks, out=side.masks.numpy()[: len(masks)])
        self.table[: len(masks)].copy_(side.masks[: len(masks)], non_blocking=True)
        if side.sent is not None:
            side.sent.record()

    @cached_property
    def _sides(self) -> list[_MasksSide]:
        on_gpu = self._device.type == "cuda"
        return [
            _MasksSide(
                torch.zeros(self._shape, dtype=torch.int32, pin_memory=on_gpu),
                torch.cuda.Event() if on_gpu else None,
            )
            for _ in range(2)
        ]


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
        return len(self._jobs)

    def begin(self, requests: Iterable[Request]) -> None:
        """Start finding the mask of each request that has a matcher and no pending token."""
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
                if not isinstance(error, RequestError):
                    seen = f"{type(error).__name__}: {error}"[:200]
                    error = RequestError("the grammar cannot go on", seen=seen)
                failed.append((request, error))
        return failed

    def place(self, requests: Sequence[Request]) -> list[int]:
        """Send the masks of a step's requests; returns each one's row of the table, -1 without a matcher."""
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
        self._jobs.pop(request.request_id, None)

    def _bits(self, request: Request) -> Bits:
        assert request.matcher is not None
        bits = np.empty(mask_words(self.table.vocab_size), np.int32)
        request.matcher.mask_into(bits, request.output_ids)
        return bits

    @cached_property
    def _threads(self) -> Executor:
        count = min(_MOST_THREADS, max(1, usable_processors() // 2))
        return self._given or ThreadPoolExecutor(count, "ingot-grammar")
