"""The record of a server's load in words, tables and panels."""

from __future__ import annotations

from typing import Any

from ingot.measure.bench.charts import COLORS, ChartMark, Panel, Series
from ingot.measure.side.text_table import Table, number, numbers

Record = dict[str, Any]
_TIMES = ("ttft", "tpot", "itl", "e2e")
_SHARES = ("p50", "mean", "p90", "p99")
_PANELS = {"ttft": "Time to first token", "tpot": "Time per output token"}


def serving_title(record: Record) -> str:
    wanted, server = record["wanted"], record["server"]
    software = f" ({server['software']})" if server["software"] else ""
    return f"{server['model']['id']} at {wanted['url']}{software}, {wanted['endpoint']}"


def serving_lines(record: Record) -> list[str]:
    """The conditions of the figures: prompts, client, method."""
    wanted, found = record["wanted"], record["machine"]
    if "lengths" in wanted:
        shape = f", {wanted['lengths']} lengths"
    elif "new_tokens" in wanted:
        shape = f", {wanted['prompt_tokens']} prompt tokens, {wanted['new_tokens']} new"
    else:
        shape = ""
    shared = f", {wanted['shared_prefix']} more shared by all" if wanted.get("shared_prefix") else ""
    commit = f" ({found['commit']})" if found["commit"] else ""
    return [
        f"{wanted['requests']} requests per load: {wanted['prompts']}{shape}{shared}",
        f"client: {found['cpu'] or 'unknown CPU'}, ingot {found['ingot']}{commit}",
        f"method: {record['method']}",
    ]


def serving_tables(record: Record) -> list[Table]:
    """Throughput by load, and times by load."""
    limits = record["wanted"]["limits_ms"]
    good = ("good req/s",) if limits else ()
    rates = [
        (
            r["load"],
            str(r["completed"]),
            str(sum(r["errors"].values())),
            *numbers(r, "requests_per_s output_tokens_per_s prompt_tokens_per_s in_flight seconds"),
            *([number(r["good_per_s"])] if limits else []),
        )
        for r in record["results"]
    ]
    columns = ("load", "done", "failed", "req/s", "output tok/s", "prompt tok/s", "in flight", "seconds")
    within = f"; good: {', '.join(f'{name} <= {ms:g} ms' for name, ms in limits.items())}" if limits else ""
    paths = " ".join(f"{name}_ms.{share}" for name in _TIMES for share in _SHARES)
    times = [(r["load"], *numbers(r, paths)) for r in record["results"]]
    heads = [head for name in _TIMES for head in (f"{name.upper()} ms", *_SHARES[1:])]
    return [
        Table(f"throughput{within}", (*columns, *good), tuple(rates)),
        Table("latency: median, mean, p90 and p99", ("load", *heads), tuple(times)),
    ]


def serving_panels(record: Record) -> list[Panel]:
    """TTFT and TPOT against completed requests per second, without loads that completed none."""
    found = []
    for name, title in _PANELS.items():
        shown = [r for r in record["results"] if r[f"{name}_ms"] is not None]
        if shown:
            series = tuple(
                Series(share, color, tuple(_mark(r, name, share) for r in shown), dashed=share != "p50")
                for share, color in zip(("p50", "p90", "p99"), COLORS, strict=False)
            )
            found.append(Panel(title, "requests/s completed", f"{name.upper()}, ms", series))
    return found


def _mark(entry: Record, name: str, share: str) -> ChartMark:
    value = entry[f"{name}_ms"][share]
    return ChartMark(entry["requests_per_s"], value, entry["load"] if share == "p99" else "")
