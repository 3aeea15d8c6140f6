"""Where a step leaves its tokens: in a table on the device for the next step, on two sides for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ingot.kernels.sampling.feed_tokens import Sent
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


class _LogprobsSide(NamedTuple):
    """Where the host reads a step's log-probabilities, and the event after which it may read them and the
    step's tokens.
    """

    logprobs: torch.Tensor
    ready: torch.cuda.Event | None


class TokenFeed:
    """The newest tokens by row, with token counts, masks and transcripts' rules beside them.

    ``table``: [max_rows] int64 on the device; a step's graph writes it and the next one's reads it.
    ``logprobs``: [max_rows, ROW_WIDTH] float64, as ``leave_logprobs`` writes it. ``sent``: where a step also
    writes its tokens, which are the host's without a copy; ``turn``: the side of the next step, which
    comes to the device with the step.
    """

    def __init__(self, max_rows: int, counts: TokenCounts) -> None:
        device = counts.device
        self.counts = counts
        self.masks = TokenMasks(counts.max_requests, counts.vocab_size, device)
        self.transcripts = Transcripts(counts.max_requests, counts.vocab_size, device)
        self.table = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(max_rows, ROW_WIDTH, dtype=torch.float64, device=device)
        on_gpu = device.type == "cuda"
        tokens = torch.zeros(2, max_rows, dtype=torch.int64, pin_memory=on_gpu)
        self.sent = Sent(tokens, torch.zeros(1, dtype=torch.int32, device=device))
        self._sides = [
            _LogprobsSide(
                torch.zeros(max_rows, ROW_WIDTH, dtype=torch.float64, pin_memory=on_gpu),
                torch.cuda.Event() if on_gpu else None,
            )
            for _ in range(2)
        ]
        self.turn = 0

    def send(self, count: int, *, logprobs: bool = False, likeliest: bool = True) -> TokensInFlight:
        """The first ``count`` rows of the step just launched, with log-probabilities as they are wanted."""
        side, tokens = self._sides[self.turn], self.sent.host[self.turn, :count]
        self.turn = 1 - self.turn
        found = side.logprobs[:count].copy_(self.logprobs[:count], non_blocking=True) if logprobs else None
        if side.ready is not None:
            side.ready.record(torch.cuda.current_stream(self.table.device))
        else:
            self.sent.side.fill_(self.turn)
        if found is not None and not likeliest:
            found = found[:, :1]
        return TokensInFlight(tokens, found, side.ready)
