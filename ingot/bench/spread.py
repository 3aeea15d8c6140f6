"""Many measurements of one thing, told in a few numbers.

Owns percentiles. Knows nothing of what was measured.

    spread([0.0041, 0.0042], scale=1e3)     # seconds told in milliseconds
"""

from __future__ import annotations

import math
from collections.abc import Sequence


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
    told = {"p50": percentile(values, 50), "p90": percentile(values, 90), "p99": percentile(values, 99)}
    told |= {"least": min(values), "most": max(values)}
    return {name: round(value * scale, 6) for name, value in told.items()}
