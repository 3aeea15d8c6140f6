"""One load answered once, seen from outside.

Owns the arrival times of tokens and what follows from them. Knows no engine.

    run = Run.of(start, arrivals, end)      # arrivals[i]: when each token of request i came
    run.ttft_s, run.tpot_s, run.seconds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Run:
    """Times of one run in seconds, by request.

    Attributes:
        seconds: from the call to the last token of all.
        ttft_s: time to first token: from the call, as all requests arrive at once.
        tpot_s: time per output token after the first, (last - first) / (tokens - 1); requests of one token
            have none and are left out.
        tokens: output tokens that arrived.
    """

    seconds: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, start: float, arrivals: Sequence[Sequence[float]], end: float) -> Self:
        """From the clock's readings: the call, every token of every request (at least one each), the end."""
        return cls(
            end - start,
            tuple(times[0] - start for times in arrivals),
            tuple((times[-1] - times[0]) / (len(times) - 1) for times in arrivals if len(times) > 1),
            tuple(len(times) for times in arrivals),
        )

    def to_json(self) -> dict[str, Any]:
        """Every figure, to the microsecond."""
        return {
            "seconds": round(self.seconds, 6),
            "ttft_s": [round(t, 6) for t in self.ttft_s],
            "tpot_s": [round(t, 6) for t in self.tpot_s],
            "tokens": list(self.tokens),
        }
