"""Limits on the differences of metrics, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ingot.errors import ConfigError


@dataclass(frozen=True)
class Limit:
    """The most that a metric may differ, in ``unit``, or if ``relative`` in percent of the reference's value;
    a ``max_delta`` without a metric's name sets those that are ``plain``.
    """

    metric: str
    most: float
    unit: str
    relative: bool = False
    plain: bool = True


_POINTS, _NATS = "points", "nats"
LIMITS: dict[str, tuple[Limit, ...]] = {
    "summarize": tuple(Limit(kind, 1.0, _POINTS) for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")),
    "caption": (
        *(Limit(kind, 1.0, _POINTS) for kind in ("rouge1", "rouge2", "rougeL")),
        Limit("rougeL_distance", 10.0, _POINTS, plain=False),
    ),
    "answers": (Limit("exact", 1.0, _POINTS), Limit("contains", 1.0, _POINTS)),
    "wer": (Limit("wer", 1.0, _POINTS), Limit("cer", 1.0, _POINTS)),
    "perplexity": (Limit("perplexity", 1.0, "%", relative=True),),
    "divergence": (Limit("kl_mean", 0.01, _NATS), Limit("top1_disagreement", 5.0, _POINTS, plain=False)),
}


@dataclass(frozen=True)
class MetricDelta:
    """A metric of both sides, their difference, and whether it is within the limit; NaN is not.

    ``stderr`` is the standard error of a difference that is a mean over items.
    """

    metric: str
    ours: float
    theirs: float | None
    delta: float
    limit: float
    unit: str
    within: bool
    stderr: float | None = None


def standard_error(differences: Sequence[float]) -> float | None:
    """Of the mean of differences item by item; None for fewer than two."""
    count = len(differences)
    if count < 2:
        return None
    middle = sum(differences) / count
    return math.sqrt(sum((one - middle) ** 2 for one in differences) / (count - 1) / count)


def limits_for(verb: str, given: Sequence[str] = ()) -> tuple[Limit, ...]:
    """The verb's limits, replaced by the user's ``X`` and ``METRIC=X``.

    Raises:
        ConfigError: X is no number from 0 on, or the verb does not judge that metric.
    """
    limits = {limit.metric: limit for limit in LIMITS[verb]}
    for one in given:
        name, equals, value = one.rpartition("=")
        if equals and name not in limits:
            raise ConfigError(
                f"eval {verb} has no such metric", seen=name, allowed=sorted(limits), field="max_delta"
            )
        try:
            most = float(value)
        except ValueError:
            most = math.nan
        if not most >= 0:
            what = "the largest difference must be 0 or more"
            raise ConfigError(what, seen=one, allowed="X or METRIC=X", field="max_delta")
        for limit in list(limits.values()):
            if limit.metric == name or (not equals and limit.plain):
                limits[limit.metric] = replace(limit, most=most)
    return tuple(limits.values())


def judge(
    limits: Sequence[Limit], ours: Mapping[str, float | None], theirs: Mapping[str, float | None] | None
) -> list[MetricDelta]:
    """The difference of every metric with a limit; without ``theirs`` the metric is a difference itself."""
    return [
        _delta(limit, _value(ours[limit.metric]), None if theirs is None else _value(theirs[limit.metric]))
        for limit in limits
    ]


def _value(metric: float | None) -> float:
    return math.nan if metric is None else metric


def _delta(limit: Limit, ours: float, theirs: float | None) -> MetricDelta:
    delta = ours if theirs is None else ours - theirs
    if limit.relative and theirs is not None:
        delta = 100 * delta / theirs if theirs else math.nan
    within = math.isfinite(delta) and abs(delta) <= limit.most
    return MetricDelta(limit.metric, ours, theirs, delta, limit.most, limit.unit, within)
