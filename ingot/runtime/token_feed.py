"""Tokens between two steps: on the device for the next step, on their way to the host for its bookkeeping.

Owns the table that a step leaves its tokens in, and the copies of it to the host. Knows no request.

    feed = TokenFeed(max_rows=64, device=device)
    flight = feed.send(count)        # after a step that ended with keep_tokens(..., feed.table)
    flight.wait()                    # token ids, once the step has run
"""

from __future__ import annotations

import torch


class TokensInFlight:
    """Tokens of one step; ``wait`` may be called until the step after the next has been sent."""

    def __init__(self, host: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self._host = host
        self._ready = ready

    def wait(self) -> list[int]:
        """Their ids, row by row; NOT_A_NUMBER for a row whose logits hold NaN."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._host.tolist()


class TokenFeed:
    """The newest tokens by row.

    ``table``: [max_rows] int64 on the device; a step's graph writes it and the next one's reads it.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.table = torch.zeros(max_rows, dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(max_rows, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._turn = 0

    def send(self, count: int) -> TokensInFlight:
        """Start copying the first ``count`` rows to the host."""
        self._turn = 1 - self._turn
        host, event = self._hosts[self._turn][:count], self._events[self._turn]
        host.copy_(self.table[:count], non_blocking=True)
        if event is not None:
            event.record()
        return TokensInFlight(host, event)
