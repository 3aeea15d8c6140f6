"""One load answered once, seen from outside, and many measurements summarized in a few numbers.

Owns the arrival times of tokens, what follows from them, and percentiles. Knows no engine.

    run = Run.of(start, arrivals, end)      # arrivals[i]: when each token of request i came
    spread(run.ttft_s, scale=1e3)           # seconds, as milliseconds
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
        together_s: between two tokens of a request while every request decodes: after the last first token,
            before the first last one. Empty where some request ends before all have begun.
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
        """From the clock's readings: the call, every token of every request (at least one each), the end."""
        return cls(
            end - start,
            tuple(times[0] - start for times in arrivals),
            tuple((times[-1] - times[0]) / (len(times) - 1) for times in arrivals if len(times) > 1),
            tuple(len(times) for times in arrivals),
            _together(arrivals),
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


def _together(arrivals: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """``together_s``, as the request sees it that ends first."""
    begun = max(times[0] for times in arrivals)
    seen = [time for time in min(arrivals, key=lambda times: times[-1]) if time >= begun]
    return tuple(after - before for before, after in pairwise(seen))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, linear between the two nearest (numpy's default).

    ``values`` holds at least one.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """Median, 90th and 99th percentile, least and most, each times ``scale``; None for no values."""
    if not values:
        return None
    figures = {"p50": percentile(values, 50), "p90": percentile(values, 90), "p99": percentile(values, 99)}
    figures |= {"least": min(values), "most": max(values)}
    return {name: round(value * scale, 6) for name, value in figures.items()}


def spread_with_mean(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """``spread``, and ``mean``."""
    found = spread(values, scale)
    return found and found | {"mean": round(sum(values) / len(values) * scale, 6)}
