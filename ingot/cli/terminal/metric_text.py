"""A proof's metric in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingot.engine.proof_file import Metric


def metric_line(metric: Metric) -> tuple[str, str]:
    """``metric``, or ``recorded`` where no limit judges it, and its text."""
    unit = f" {metric.unit}" if metric.unit else ""
    parts = [f"{metric.name} {metric.value:g}{unit}"]
    if metric.limit is not None:
        sign = "<=" if metric.better == "lower" else ">="
        missed = ", MISSED" if metric.met is False else ""
        parts.append(f"(limit {sign} {metric.limit:g}{unit}{missed})")
    parts.append(f"on {metric.data}" if metric.items is None else f"on {metric.items} of {metric.data}")
    if metric.window is not None:
        parts.append("with window {}, stride {}".format(*metric.window))
    if metric.dtype is not None:
        parts.append(f"in {metric.dtype}")
    if metric.against is not None:
        own = "" if metric.against_value is None else f": {metric.against_value:g}"
        other = "" if metric.against_dtype in (None, metric.dtype) else f" in {metric.against_dtype}"
        parts.append(f"against {metric.against}{other}{own}")
    return ("recorded" if metric.met is None else "metric"), " ".join(parts)
