"""A step whose tokens the host has not read.

Owns which request each of its tokens is for. Knows no device and no queue.

    ahead = StepAhead(requests, probed, runner.launch(batch, draws))
    for request, token, logprobs in ahead.read(): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ingot.runtime.sampling.pending_tokens import TokensInFlight
from ingot.runtime.sampling.token_logprobs import TokenLogprobs, read_logprobs
from ingot.runtime.scheduling.request import Request


@dataclass(frozen=True)
class StepAhead:
    """The requests that its tokens are for, in the tokens' order, then those whose probes it reached."""

    requests: list[Request]
    probed: list[Request]
    tokens: TokensInFlight

    def read(self) -> Iterator[tuple[Request, int, TokenLogprobs | None]]:
        """Wait for the tokens, and give them out with the log-probabilities that are wanted; requests that
        have ended get none.
        """
        tokens, rows = self.tokens.wait()
        for i, request in enumerate(self.probed, start=len(self.requests)):
            assert rows is not None
            request.probed = rows[i][0]
        for i, request in enumerate(self.requests):
            request.num_pending -= 1
            if request.ended:
                continue
            wanted = request.params.logprobs
            found = None if rows is None or wanted is None else read_logprobs(rows[i], tokens[i], wanted)
            yield request, tokens[i], found
