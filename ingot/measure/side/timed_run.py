"""Arrival times of one load's tokens, and percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class Run:
    """Times of one run in seconds, by request.

    Attributes:
        seconds: from the call to the last token of all.
        ttft_s: time to first token, from the call.
        tpot_s: time per output token after the first, (last - first) / (tokens - 1); not of requests of one
            token.
        tokens: output tokens that arrived.
        together_s: between two tokens of a request while every request decodes: after the last first token,
            before the first last one. Empty if a request ends before all have begun.
        token_ids: the output tokens, by request.
    """

    seconds: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    tokens: tuple[int, ...]
    together_s: tuple[float, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls,
        start: float,
        arrivals: Sequence[Sequence[float]],
        end: float,
        token_ids: Sequence[Sequence[int]] = (),
    ) -> Self:
        """From times of the call, of every request's tokens (at least one each), and of the end."""
        begun = max(times[0] for times in arrivals)
        first_to_end = min(arrivals, key=lambda times: times[-1])
        return cls(
            end - start,
            tuple(times[0] - start for times in arrivals),
            tuple((times[-1] - times[0]) / (len(times) - 1) for times in arrivals if len(times) > 1),
            tuple(len(times) for times in arrivals),
            tuple(b - a for a, b in pairwise(time for time in first_to_end if time >= begun)),
            tuple(map(tuple, token_ids)),
        )

    def to_json(self) -> dict[str, Any]:
        """To the microsecond, without the tokens."""
        return {
            "seconds": round(self.seconds, 6),
            "ttft_s": [round(t, 6) for t in self.ttft_s],
            "tpot_s": [round(t, 6) for t in self.tpot_s],
            "tokens": list(self.tokens),
            "together_s": [round(t, 6) for t in self.together_s],
        }


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """Median, 90th and 99th percentile, minimum and maximum, each times ``scale``; None for no values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    figures = {"p50": p50, "p90": p90, "p99": p99, "least": min(values), "most": max(values)}
    return {name: round(value * scale, 6) for name, value in figures.items()}


def spread_with_mean(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """``spread``, and ``mean``."""
    found = spread(values, scale)
    return found and found | {"mean": round(sum(values) / len(values) * scale, 6)}
