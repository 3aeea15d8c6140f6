"""A comparison as JSON, as an HTML page, and as the few stages of a short table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jinja2

from ingot.measure.align.align_session import Report
from ingot.measure.align.align_target import TextCheck
from ingot.measure.align.isolated_judge import Alone
from ingot.measure.align.stage_verdict import SERVED, FirstBad, StageRow
from ingot.measure.align.stages.stage_names import kind_of
from ingot.measure.align.stop_ids_check import StopCheck

BEFORE = 3  # stages shown before the first bad one
NOTABLY = 1.01  # another step of a stage is shown too if it is this much further out
_PARTS = {  # of a module
    "query": "in its queries",
    "keys": "in its keys",
    "attended": "before its output product",
    "cross_attended": "before its output product",
    "inner": "before its down product",
}
_ENDS = ("logits", SERVED)  # always shown
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ingot align: {{ r.engine }}</title>
<style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child, .text { text-align: left }
td, pre { font-family: ui-monospace, monospace; font-size: 12.5px }
.bad td { background: #fde8e8 } .yes { color: #17692f } .no { color: #a31515 }
.bar { display: inline-block; height: .6rem; background: #7aa7d8; vertical-align: middle }
.bad .bar { background: #d86a6a } .stops { white-space: pre-line }
pre { background: #f5f5f5; padding: .7rem; white-space: pre-wrap }
</style></head><body>
<h1>ingot align: <span class="{{ 'yes' if r.aligned else 'no' }}">{{ verdict }}</span></h1>
<table>
{% for name, value in facts %}<tr><td>{{ name }}</td><td class="text">{{ value }}</td></tr>{% endfor %}
</table>
<p class="stops {{ 'no' if r.stops.is_bad }}">{{ stops }}</p>
{% if r.tensors %}<p class="{{ 'no' if r.tensors.differences }}">{{ r.tensors.text }}</p>
{% for one in r.tensors.differences %}<p>{{ one.name }}: {{ one.text }}</p>{% endfor %}{% endif %}
{% if first %}<h2>First bad stage: {{ r.first.row.stage }}, step {{ r.first.row.step }}</h2>
<p>{{ why }}</p>
<table><tr><th></th>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for side in ("expected", "got") %}<tr><td>{{ side }}</td>
{% for name in columns %}<td>{{ first[side][name] }}</td>{% endfor %}</tr>{% endfor %}</table>
<p>Largest difference at position {{ r.first.position }}, channel {{ channel }}:
expected {{ "%.6g" % r.first.expected_value }}, got {{ "%.6g" % r.first.got_value }}.</p>{% endif %}
{% if r.findings %}<h2>Causes</h2><ul>
{% for f in r.findings %}<li>{{ f.text }}</li>{% endfor %}</ul>{% endif %}
{% for case in cases %}<h2>Prompt {{ loop.index }}: {{ case.title }}</h2>
{% for check in case.checks %}<p>{{ check.stage }}: <b class="{{ 'no' if check.is_bad else 'yes' }}">
{{ "differs" if check.is_bad else "equal" }}</b> ({{ check.against }})</p>
{% if check.is_bad %}<pre>expected {{ check.expected }}
got      {{ check.got }}</pre>{% endif %}{% endfor %}
{% for step, rows in case.steps %}<details {{ "open" if rows.open }}>
<summary>{{ "the prompt" if step == 0 else "decode step %d" % step }}{{ rows.greedy }}</summary>
<table><tr><th>stage</th><th>max-abs</th><th>relative L2</th><th>alone</th><th>floor</th><th>limit</th>
<th>cosine</th><th>of limit</th></tr>
{% for row in rows.rows %}<tr class="{{ 'bad' if row.bad }}"><td>{{ row.stage }}</td>
{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}
<td class="text"><span class="bar" style="width:{{ row.width }}px"></span> {{ row.share }}</td></tr>
{% endfor %}</table></details>{% endfor %}{% endfor %}
</body></html>
"""


def report_json(report: Report) -> dict[str, Any]:
    return {
        "aligned": report.aligned,
        "first_stage": report.first_stage,
        "engine": report.engine,
        "reference": report.reference,
        "noise": report.noise,
        "dtype": report.dtype,
        "quantized": report.quant,
        "device": report.device,
        "steps": report.steps,
        "cases": [
            {"title": c.title, "ids": c.ids, "checks": [_check(k) for k in c.checks]} for c in report.cases
        ],
        "stop_ids": _stops(report.stops),
        "tensors": None if report.tensors is None else asdict(report.tensors),
        "first": None if report.first is None else _first(report.first),
        "findings": [asdict(f) for f in report.findings],
        "rows": [_row(row) for row in report.rows],
        "greedy": [asdict(row) for row in report.greedy],
    }


def report_html(report: Report) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    first = None if report.first is None else _first(report.first)
    return environment.from_string(_PAGE).render(
        r=report,
        verdict=verdict_text(report),
        facts=facts(report),
        stops=stops_text(report.stops),
        first=first,
        why=why_text(report.first) if report.first is not None else "",
        channel=None if first is None else first["channel"],
        columns=("shape", "dtype", "mean", "std", "min", "max"),
        cases=[_case(report, index) for index in range(len(report.cases))],
    )


def _case(report: Report, index: int) -> dict[str, Any]:
    case, steps = report.cases[index], []
    for step in sorted({row.step for row in report.rows if row.case == index}):
        rows = [_shown(row) for row in report.rows if (row.case, row.step) == (index, step)]
        greedy = next((g for g in report.greedy if (g.case, g.step) == (index, step)), None)
        chosen = "" if greedy is None else f": greedy id {greedy.expected}"
        if greedy is not None and greedy.got != greedy.expected:
            chosen += f", the engine's {greedy.got}"
        is_open = step == 0 or any(row["bad"] for row in rows)
        steps.append((step, {"rows": rows, "open": is_open, "greedy": chosen}))
    return {"title": case.title, "checks": case.checks, "steps": steps}


def _shown(row: StageRow) -> dict[str, Any]:
    share = min(row.difference.relative / row.limit, 1e6)
    return {
        "stage": row.stage,
        "cells": cells(row),
        "bad": row.is_bad or row.is_wrong_alone,
        "width": int(min(share, 3) * 40),
        "share": f"{share:.2g}",
    }


def verdict_text(report: Report) -> str:
    if report.aligned:
        return "aligned"
    ids = report.bad_texts or report.stops.is_bad
    step = "" if report.first is None or ids else f", step {report.first.row.step}"
    return f"diverged at {report.first_stage}{step}"


def why_text(first: FirstBad) -> str:
    limit = f"limit {first.row.limit:.2e}"
    if first.alone and first.row.alone is not None:
        return alone_text(first.row.alone)
    if first.row.stage == SERVED:
        return (
            "Each module alone is within its limit, but in the steps that requests run the engine is off by "
            f"{first.row.difference.relative:.2e} ({limit}): suspect a kernel or graph only requests use."
        )
    return (
        f"The engine is off by {first.row.difference.relative:.2e} here ({limit}), but no module exceeds "
        "its limit when given the reference's input: small differences add up to this."
    )


def alone_text(alone: Alone) -> str:
    """How a module is wrong by itself."""
    off = f"off by {alone.relative:.2e} (limit {alone.limit:.2e})"
    if alone.of_config:
        return f"Its config or weights are not the original's: on the same input, in fp32, they are {off}."
    kind = alone.place.rpartition(".")[2]
    part = f", {_PARTS[kind]}," if kind in _PARTS else ""
    if alone.relative <= alone.limit:
        off = (
            f"off in what many values have in common, by {alone.common:.2e} (limit {alone.common_limit:.2e})"
        )
    return f"The module is wrong by itself: on the reference's own input it is{part} {off}."


def facts(report: Report) -> list[tuple[str, str]]:
    return [
        ("engine", f"{report.engine}, {report.dtype} on {report.device}"),
        ("reference", report.reference),
        *([] if report.quant is None else [("quantized", report.quant)]),
        ("noise floor", report.noise),
        ("steps", f"the prompt and {report.steps} cached decode steps"),
    ]


def cells(row: StageRow) -> list[str]:
    """A stage's figures: max-abs, relative, alone, floor, limit, cosine."""
    found = row.difference
    alone = "" if row.alone is None else f"{row.alone.relative:.2e}"
    numbers = [f"{found.max_abs:.2e}", f"{found.relative:.2e}", alone, f"{row.floor:.2e}", f"{row.limit:.2e}"]
    return [*numbers, f"{found.cosine:.6f}"]


def stops_text(check: StopCheck) -> str:
    if check.expected is None:
        return f"stop ids: not compared, {check.against} records none; the engine's: {check.named(check.got)}"
    if check.is_bad:
        return (
            f"stop ids: differ ({check.against})\n  expected {check.named(check.expected)}\n"
            f"  got      {check.named(check.got)}"
        )
    more = check.named(check.designed)
    beside = (
        f"; the engine also stops at {more}, as the checkpoint's other files say" if check.designed else ""
    )
    return f"stop ids: equal, {check.named(check.expected)} ({check.against}){beside}"


def _stops(check: StopCheck) -> dict[str, Any]:
    equal = None if check.expected is None else not check.is_bad
    return asdict(check) | {"missing": check.missing, "extra": check.extra, "equal": equal}


def _check(check: TextCheck) -> dict[str, Any]:
    return asdict(check) | {"equal": not check.is_bad, "first": check.first}


def _first(first: FirstBad) -> dict[str, Any]:
    alone = first.row.alone if first.alone else None
    where = first.row.difference if alone is None else alone
    return {
        "stage": first.row.stage,
        "case": first.row.case,
        "step": first.row.step,
        "wrong_alone": first.alone,
        "why": why_text(first),
        "expected": asdict(first.expected),
        "got": asdict(first.got),
        "position": first.position,
        "token": where.token,
        "channel": where.channel,
        "expected_value": first.expected_value,
        "got_value": first.got_value,
    }


def _row(row: StageRow) -> dict[str, Any]:
    limits: dict[str, float | None] = {"limit": row.limit, "alone_limit": None, "alone_floor": None}
    if row.alone is not None:
        limits |= {"alone_limit": row.alone.limit, "alone_floor": row.alone.floor}
    return asdict(row) | limits | {"bad": row.is_bad, "wrong_alone": row.is_wrong_alone}


@dataclass(frozen=True)
class ReportLine:
    """A stage with a note, or without a row a note on stages that are left out."""

    row: StageRow | None
    note: str = ""


def all_lines(rows: Sequence[StageRow]) -> list[ReportLine]:
    """Every stage in the step and prompt that is furthest out."""
    return [ReportLine(row) for row in _furthest(rows, lambda row: row.stage)]


def short_lines(rows: Sequence[StageRow], first: FirstBad | None) -> list[ReportLine]:
    """The worst of each kind of stage, or the surroundings of the first bad one."""
    if first is None:
        lines = []
        for row in _furthest(rows, lambda row: kind_of(row.stage)):
            count = len({other.stage for other in rows if kind_of(other.stage) == kind_of(row.stage)})
            lines.append(ReportLine(row, f"worst of {count} layers" if count > 1 else ""))
        return lines
    return list(_around(_furthest(rows, lambda row: row.stage), first.row))


def share_of_limit(row: StageRow) -> float:
    """How far out a row is, as a whole or by itself: 1 is at its limit."""
    alone = 0.0 if row.alone is None else row.alone.share
    return max(row.difference.relative / row.limit, alone)


def _furthest(rows: Sequence[StageRow], key: Callable[[StageRow], str]) -> list[StageRow]:
    """The row furthest out of every key, in order of first appearance."""
    found: dict[str, StageRow] = {}
    for row in rows:
        best = found.get(key(row))
        if best is None or share_of_limit(row) > share_of_limit(best):
            found[key(row)] = row
    return list(found.values())


def _around(stages: Sequence[StageRow], first: StageRow) -> Iterator[ReportLine]:
    """The last stages before the first bad one, itself, and the logits."""
    at = next(i for i, row in enumerate(stages) if row.stage == first.stage)
    start = max(at - BEFORE, 0)
    yield from _fold(stages[:start], "earlier")
    yield from (ReportLine(row) for row in stages[start:at])
    yield ReportLine(first)
    worst = stages[at]
    if share_of_limit(worst) > NOTABLY * share_of_limit(first):
        yield ReportLine(worst, "its worst step")
    later = stages[at + 1 :]
    yield from _fold([row for row in later if row.stage not in _ENDS], "later")
    yield from (ReportLine(row) for row in later if row.stage in _ENDS)


def _fold(stages: Sequence[StageRow], side: str) -> Iterator[ReportLine]:
    bad = sum(row.is_bad or row.is_wrong_alone for row in stages)
    if not stages:
        return
    count = f"{len(stages)} {side} stage{'s' if len(stages) > 1 else ''}"
    if not bad:
        yield ReportLine(None, f"{count} within the limits")
    elif bad == len(stages):
        yield ReportLine(None, f"{count} beyond the limits too")
    else:
        yield ReportLine(None, f"{count}, {bad} of them beyond the limits")
