"""The tables in which a step leaves its tokens on the device, and their copies to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ingot.runtime.sampling.grammar_masks import TokenMasks
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.sampling.token_logprobs import ROW_WIDTH
from ingot.runtime.sampling.transcript_masks import Transcripts


class TokensInFlight:
    """Tokens of one step; ``wait`` may be called until the step after the next has been sent."""

    def __init__(
        self, host: torch.Tensor, logprobs: torch.Tensor | None, ready: torch.cuda.Event | None
    ) -> None:
        self._host = host
        self._logprobs = logprobs
        self._ready = ready

    def wait(self) -> tuple[list[int], list[list[float]] | None]:
        """Their ids, row by row, NOT_A_NUMBER for a row whose logits hold NaN; and, if they were sent, the
        rows of log-probabilities, for ``read_logprobs``.
        """
        if self._ready is not None:
            self._ready.synchronize()
        return self._host.tolist(), None if self._logprobs is None else self._logprobs.tolist()


class _HostSide(NamedTuple):
    """The buffers of one step's copy, and the event after which they are filled."""

    table: torch.Tensor
    logprobs: torch.Tensor
    ready: torch.cuda.Event | None


class TokenFeed:
    """The newest tokens by row, with token counts, masks and transcripts' rules beside them.

    ``table``: [max_rows] int64 on the device; a step's graph writes it and the next one's reads it.
    ``logprobs``: [max_rows, ROW_WIDTH] float64, as ``leave_logprobs`` writes it.
    """

    def __init__(self, max_rows: int, counts: TokenCounts) -> None:
        device = counts.device
        self.counts = counts
        self.masks = TokenMasks(counts.max_requests, counts.vocab_size, device)
        self.transcripts = Transcripts(counts.max_requests, counts.vocab_size, device)
        self.table = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(max_rows, ROW_WIDTH, dtype=torch.float64, device=device)
        on_gpu = device.type == "cuda"
        self._sides = [
            _HostSide(
                torch.zeros(max_rows, dtype=torch.int64, pin_memory=on_gpu),
                torch.zeros(max_rows, ROW_WIDTH, dtype=torch.float64, pin_memory=on_gpu),
                torch.cuda.Event() if on_gpu else None,
            )
            for _ in range(2)
        ]
        self._turn = 0

    def send(self, count: int, *, logprobs: bool = False, likeliest: bool = True) -> TokensInFlight:
        """Start copying the first ``count`` rows to the host, with log-probabilities as they are wanted."""
        self._turn = 1 - self._turn
        side = self._sides[self._turn]
        side.table[:count].copy_(self.table[:count], non_blocking=True)
        found = side.logprobs[:count].copy_(self.logprobs[:count], non_blocking=True) if logprobs else None
        if side.ready is not None:
            side.ready.record(torch.cuda.current_stream(self.table.device))
        if found is not None and not likeliest:
            found = found[:, :1]
        return TokensInFlight(side.table[:count], found, side.ready)
