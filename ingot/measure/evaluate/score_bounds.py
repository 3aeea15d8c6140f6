"""Bounds on engines' own scores, which need no reference: ROUGE of at least 14, a WER of at most 6."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ingot.errors import ConfigError
from ingot.measure.evaluate.eval_record import BEYOND, WITHIN, Evaluation
from ingot.measure.evaluate.rouge import KINDS

Better = Literal["higher", "lower"]

_ROUGE = [f"{kind}{part}" for kind in KINDS for part in ("", "_precision", "_recall")]
_LOSS: dict[str, Better] = {"perplexity": "lower", "nats_per_token": "lower", "bits_per_byte": "lower"}
_DISTANCE: dict[str, Better] = {"kl_mean": "lower", "kl_p99": "lower", "kl_max": "lower"}
SCORES: dict[str, dict[str, Better]] = {  # verb → its scores, and which way each is better
    "summarize": dict.fromkeys(_ROUGE, "higher"),
    "caption": dict.fromkeys(_ROUGE, "higher"),
    "answers": {"exact": "higher", "contains": "higher"},
    "wer": {"wer": "lower", "cer": "lower"},
    "perplexity": _LOSS,
    "divergence": {**_DISTANCE, "top1_agreement": "higher", **_LOSS},
}
_PERCENT = {*_ROUGE, "exact", "contains", "top1_agreement"}  # 0 to 100


@dataclass(frozen=True)
class ScoreBound:
    """The worst value allowed of a metric: the lowest where ``better`` is higher, else the highest."""

    metric: str
    value: float
    better: Better

    def met_by(self, score: float | None) -> bool:
        """Whether a score is as good; None and NaN are not."""
        if score is None or not math.isfinite(score):
            return False
        return score >= self.value if self.better == "higher" else score <= self.value


def bounds_for(
    verb: str, at_least: Sequence[str] = (), at_most: Sequence[str] = ()
) -> tuple[ScoreBound, ...]:
    """The bounds of ``METRIC=X``: lowest values of scores where higher is better, highest of the others.

    Raises:
        ConfigError: the verb has no such score, its bound is on the other side, or X is not a value of it.
    """
    given = [("at_least", "higher", one) for one in at_least] + [("at_most", "lower", one) for one in at_most]
    return tuple(_bound(verb, field, better, one) for field, better, one in given)


def _bound(verb: str, field: str, side: str, given: str) -> ScoreBound:
    name, equals, text = given.partition("=")
    scores = SCORES[verb]
    own = [f"{metric}=X" for metric, better in scores.items() if better == side]
    if equals and name in scores and scores[name] != side:
        other = "at_most" if field == "at_least" else "at_least"
        raise ConfigError(
            f"a {scores[name]} {name} is better, so its bound is on the other side",
            seen=given,
            field=field,
            fix=f"`{other}={given}`",
        )
    if not equals or name not in scores:
        raise ConfigError(f"eval {verb} has no such score", seen=given, allowed=own or "none", field=field)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    most = 100.0 if name in _PERCENT else math.inf
    if not (math.isfinite(value) and 0 <= value <= most):
        allowed = f"{name}=X, X from 0 {'to 100' if name in _PERCENT else 'on'}"
        raise ConfigError("the bound is not a value of this score", seen=given, allowed=allowed, field=field)
    return ScoreBound(name, value, scores[name])


def with_bounds(found: Evaluation, bounds: Sequence[ScoreBound], *, against: bool = False) -> Evaluation:
    """The evaluation with scores beside their bounds, of the engine and of each further side, but not of the
    reference, which is the second side if there is one (``against``); the verdict is on these, too.

    The record gains ``bounds``, a list of metric, side (its name), score, value (the bound), better and met.
    """
    record = found.record
    engine, *others = record["sides"]
    judged = []
    for side in (engine, *others[1 if against else 0 :]):
        scores: Mapping[str, Any] = side["metrics"]
        if side is engine:
            scores = {**scores, **record.get("divergence", {})}
        for bound in bounds:
            score = scores.get(bound.metric)
            judged.append(
                asdict(bound) | {"side": side.get("name"), "score": score, "met": bound.met_by(score)}
            )
    verdict = record["verdict"]
    if judged and verdict != BEYOND:
        verdict = WITHIN if all(one["met"] for one in judged) else BEYOND
    return Evaluation(record | {"bounds": judged, "verdict": verdict}, found.rows)
