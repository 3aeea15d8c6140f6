"""The record of a sweep's points, and its Pareto line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ingot.errors import ConfigError
from ingot.measure.bench.latency import METHOD
from ingot.measure.bench.sweep.sweep_line import OK
from ingot.measure.bench.transcription_speed import TranscriptionBench
from ingot.measure.side.side_spec import HUGGINGFACE

SCHEMA = 1
LOWER_IS_BETTER = frozenset({"perplexity", "kl", "divergence", "wer", "loss"})
_POINT = ("batch", "figures", "memory", "facts", "ceiling", "doubts", "at")
Record = dict[str, Any]


def record_of(records: list[Record]) -> Record:
    """The record of a folder's points; of the same point, the last one counts."""
    if not records:
        raise ConfigError("there are no measured points", field="out", fix="`out` with a folder of a sweep")
    names = dict.fromkeys(record["line"] for record in records)
    lines = [_line_record(name, [r for r in records if r["line"] == name]) for name in names]
    last = records[-1]
    of_hf = with_ratios(lines) if of_requests(last["settings"]) else None
    return {
        "schema": SCHEMA,
        "verb": "sweep",
        "commands": list(dict.fromkeys(record["command"] for record in records)),
        "commits": list(dict.fromkeys(record["machine"]["commit"] for record in records)),
        "machine": last["machine"],
        "settings": last["settings"],
        "shape": last["shape"],
        "method": TranscriptionBench.method if of_clips(last["settings"]) else METHOD,
        "lines": lines,
        "pareto": best(lines),
    } | ({"ratio_of": of_hf} if of_requests(last["settings"]) else {})


def with_ratios(lines: list[Record]) -> str | None:
    """Add ``ratio_to_hf`` to each point: the seconds of the first line of Hugging Face's class for the same
    requests at the same batch size, over its own (None where that has no such point). Returns that line's
    name. Requests/s, input and output tokens/s have the same ratio.
    """
    first = next((line for line in lines if line["kind"] == HUGGINGFACE), None)
    found = {} if first is None else {p["batch"]: _seconds(p) for p in first["points"]}
    for line in lines:
        for point in line["points"]:
            theirs = found.get(point["batch"])
            point["ratio_to_hf"] = None if theirs is None else round(theirs / _seconds(point), 4)
    return None if first is None else str(first["name"])


def _seconds(point: Record) -> float:
    return float(point["figures"]["seconds"]["p50"])


def best(lines: list[Record]) -> Record:
    """The Pareto line: of each line's fastest point against quality if at least two lines have the same
    metric, else of all points against memory.
    """
    counts = Counter(metric for line in lines if line["points"] for metric in line["quality"])
    metric = next((metric for metric, count in counts.items() if count > 1), None)
    points = [(line, point) for line in lines for point in line["points"]]
    if metric is not None:
        rated = [line for line in lines if metric in line["quality"] and line["points"]]
        points = [(line, max(line["points"], key=speed)) for line in rated]
    costs = [
        memory_gb(point) if metric is None else quality_cost(metric, line["quality"][metric])
        for line, point in points
    ]
    kept = pareto([(cost, speed(point)) for cost, (_, point) in zip(costs, points, strict=True)])
    named = [[points[i][0]["name"], points[i][1]["batch"]] for i in kept]
    return {"against": metric or "memory", "points": named}


def of_clips(settings: Record) -> bool:
    """Whether the points are of a speech model's clips, not of prompts."""
    return "clips" in settings


def of_requests(settings: Record) -> bool:
    """Whether the points are of a file's requests."""
    return "max_prompt" in settings


def speed(point: Record) -> float:
    """Output tokens per second, or seconds of audio per second."""
    figures = point["figures"]
    return float(figures["rtfx"] if "rtfx" in figures else figures["output_tokens_per_s"])


def memory_gb(point: Record) -> float:
    """A GPU's peak memory; on a CPU, where other memory of the process is larger, weights and cache."""
    memory = point["memory"]
    if "peak_gpu_gb" in point["facts"]:
        return float(memory["peak_gb"])
    return float(memory["weights_gb"] + memory["cache_gb"])


def quality_cost(metric: str, value: float) -> float:
    """The metric with a sign such that lower is better."""
    return value if lower_is_better(metric) else -value


def lower_is_better(metric: str) -> bool:
    return any(word in LOWER_IS_BETTER for word in metric.lower().split("_"))


def pareto(choices: Sequence[tuple[float, float]]) -> list[int]:
    """The places of the (cost, gain) pairs that no other pair equals or beats in both, in order of cost. Of
    equal pairs the first is kept.
    """
    order = sorted(range(len(choices)), key=lambda i: (choices[i][0], -choices[i][1], i))
    kept: list[int] = []
    for i in order:
        if not kept or choices[i][1] > choices[kept[-1]][1]:
            kept.append(i)
    return kept


def _line_record(name: str, records: list[Record]) -> Record:
    newest = {record["batch"]: record for record in records if "status" in record}
    points = [newest[batch] for batch in sorted(newest) if newest[batch]["status"] == OK]
    ends = [record for record in newest.values() if record["status"] != OK]
    end = min(ends, key=lambda record: record["batch"]) if ends else None
    rated = [record for record in records if "quality" in record]
    first = records[0]
    return {
        "name": name,
        "kind": first["kind"],
        "dtype": first["dtype"],
        "quant": first["quant"],
        "quality": rated[-1]["quality"] if rated else {},
        "no_quality": rated[-1].get("reason") if rated else None,
        "points": [{key: p[key] for key in _POINT} for p in points],
        "limit": None if end is None else {key: end[key] for key in ("batch", "status", "reason")},
    }
