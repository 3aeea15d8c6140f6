"""A sweep as a title, a table and panels to draw."""

from __future__ import annotations

from itertools import count
from typing import Any

from ingot.measure.bench.charts import COLORS, OTHER_COLOR, ChartMark, Panel, Series
from ingot.measure.bench.sweep.sweep_line import DIED
from ingot.measure.bench.sweep.sweep_record import lower_is_better, memory_gb, of_clips, of_requests, speed
from ingot.measure.side.text_table import Table, counted, number, numbers, percent, times

Record = dict[str, Any]
_SMALL_GB = 1.0


def sweep_title(record: Record) -> str:
    found, settings = record["machine"], record["settings"]
    random = ", random weights" if settings["random_weights"] else ""
    return f"{settings['model']}{random} on {found.get('gpu') or found['cpu'] or 'unknown CPU'}"


def sweep_lines(record: Record) -> list[str]:
    """The conditions of the figures: shape of the model and the requests, versions, method."""
    shape, settings, found = record["shape"], record["settings"], record["machine"]
    threads = settings["threads"] or found["cpu_threads_used"]
    cores = "" if "gpu" in found else f", CPU threads: {threads}"
    commits = ", ".join(commit or "unknown commit" for commit in record["commits"])
    return [
        f"{shape['architecture']}: hidden {shape['hidden_size']}, {shape['num_layers']} layers, "
        f"{shape['num_heads']} heads, intermediate {shape['intermediate_size']}, "
        f"vocabulary {shape['vocab_size']}",
        f"{_load(settings)}, {counted(settings['repeats'], 'repeat')}; {record['method']}",
        *_choice(settings),
        f"torch {found['torch']}, triton {found['triton'] or 'none'}, ingot {found['ingot']} "
        f"({commits}){cores}",
    ]


def _load(settings: Record) -> str:
    if of_clips(settings):
        return f"{settings['clips']} clips of {settings['tokens_per_second']:g} tokens per second of audio"
    if of_requests(settings):
        return (
            f"{settings['requests']:,} requests of {settings['file']}, {settings['input_tokens']:,} input "
            f"and {settings['output_tokens']:,} output tokens"
        )
    return f"requests of {settings['prompt_tokens']} prompt tokens and {settings['new_tokens']} new"


def _choice(settings: Record) -> list[str]:
    """How the requests of a file were chosen, and which were not."""
    if not of_requests(settings):
        return []
    left_out = [f"{count:,} {reason}" for reason, count in settings["left_out"].items()]
    reasons = f"; left out: {', '.join(left_out)}" if left_out else ""
    cut = f"; {settings['cut']:,} answers cut" if settings["cut"] else ""
    return [
        f"prompts of at most {settings['max_prompt']} tokens, answers of {settings['max_new']}, drawn with "
        f"seed {settings['seed']}, tokens counted by {settings['counted_by']}{cut}{reasons}"
    ]


def limits(record: Record) -> list[str]:
    """The limits that lines met, and the lines without the quality that was asked for."""
    ended = [(line["name"], line["limit"]) for line in record["lines"] if line["limit"] is not None]
    without = [line for line in record["lines"] if line["no_quality"] is not None]
    endings = {DIED: "could not be measured"}
    return [
        *(
            f"{name}: batch {end['batch']} {endings.get(end['status'], end['status'])} ({end['reason']})"
            for name, end in ended
        ),
        *(f"{line['name']}: no quality ({line['no_quality']})" for line in without),
    ]


def broken(record: Record) -> bool:
    """Whether a point or a quality is missing for another reason than memory."""
    return any(
        line["no_quality"] is not None or (line["limit"] or {}).get("status") == DIED
        for line in record["lines"]
    )


def sweep_table(record: Record) -> Table:
    """A row for each precision and batch, and one for a size that does not fit."""
    settings = record["settings"]
    measured = _columns(settings)
    has_ratio = record.get("ratio_of") is not None
    metrics = list(dict.fromkeys(metric for line in record["lines"] for metric in line["quality"]))
    front = {(name, batch) for name, batch in record["pareto"]["points"]}
    unit, scale = memory_unit(record)
    rows = []
    for line in record["lines"]:
        for point in line["points"]:
            note = "Pareto" if (line["name"], point["batch"]) in front else ""
            figures = point["figures"]
            sizes = (point["memory"][f"{name}_gb"] for name in _MEMORY)
            row = (
                line["name"],
                str(point["batch"]),
                *(percent(figures[m]) if m in _SHARES else numbers(figures, m)[0] for m in measured.values()),
                *([times(point["ratio_to_hf"])] if has_ratio else []),
                *(number(None if size is None else size * scale) for size in sizes),
            )
            rows.append((*row, *_quality(line, metrics), note))
        if line["limit"] is not None:
            blank = ("-",) * (len(measured) + has_ratio + len(_MEMORY))
            named = (line["name"], str(line["limit"]["batch"]))
            rows.append((*named, *blank, *_quality(line, metrics), line["limit"]["status"]))
    memory = tuple(f"{name} {unit}" for name in _MEMORY)
    if of_clips(settings):
        title = f"sweep, {settings['clips']} clips"
    elif of_requests(settings):
        title = f"sweep, {settings['requests']:,} requests"
    else:
        title = f"sweep, {settings['prompt_tokens']} prompt tokens, {settings['new_tokens']} new"
    ratio = ("of HF",) if has_ratio else ()
    return Table(title, ("precision", "batch", *measured, *ratio, *memory, *metrics, "note"), tuple(rows))


def memory_unit(record: Record) -> tuple[str, float]:
    """GB, or MB and 1000 where all points are small."""
    most = max((memory_gb(p) for line in record["lines"] for p in line["points"]), default=_SMALL_GB)
    return ("GB", 1.0) if most >= _SMALL_GB else ("MB", 1000.0)


def panels(record: Record) -> list[Panel]:
    """Speed against memory and latency, and against quality where the lines have it; [] without points."""
    lines = [line for line in record["lines"] if line["points"]]
    if not lines:
        return []
    free, axis = count(), _axis(lines[0]["points"][0])
    palette = {
        line["name"]: OTHER_COLOR if line["kind"] == "hf" else COLORS[next(free) % len(COLORS)]
        for line in lines
    }
    unit, scale = memory_unit(record)
    of = "peak GPU memory" if "gpu" in record["machine"] else "weights and KV cache"
    front = {(name, batch) for name, batch in record["pareto"]["points"]}
    by_memory = record["pareto"]["against"] == "memory"
    series = _series(lines, palette, lambda line, p: memory_gb(p) * scale)
    title = "Speed against memory, by batch size"
    found = [_panel(title, f"{of}, {unit}", axis, series, front if by_memory else set())]
    if all(point["figures"].get("decode_ms") for line in lines for point in line["points"]):
        step = "ms per decode step (one token per request)"
        series = _series(lines, palette, lambda line, p: p["figures"]["decode_ms"]["p50"])
        found.append(_panel("Speed against latency, by batch size", step, axis, series, set()))
    elif all(point["figures"].get("tpot_ms") for line in lines for point in line["points"]):
        series = _series(lines, palette, lambda line, p: p["figures"]["tpot_ms"]["p50"])
        token = "ms per output token of a request, after its first"
        found.append(_panel("Speed against latency, by batch size", token, axis, series, set()))
    if not by_memory:
        found.append(_quality_panel(lines, palette, record["pareto"]))
    return found


_REQUESTS = {  # the columns, and the figures in them
    "TTFT ms": "ttft_ms.p50",
    "decode ms": "decode_ms.p50",
    "prompt tok/s": "prompt_tokens_per_s",
    "output tok/s": "output_tokens_per_s",
    "req/s": "requests_per_s",
    "MBU": "mbu",
}
_OF_FILE = {
    "seconds": "seconds.p50",
    "req/s": "requests_per_s",
    "input tok/s": "input_tokens_per_s",
    "output tok/s": "output_tokens_per_s",
    "TTFT ms": "ttft_ms.p50",
    "TPOT ms": "tpot_ms.p50",
}
_CLIPS = {
    "seconds": "seconds.p50",
    "RTFx": "rtfx",
    "clip ms": "clip_ms.p50",
    "output tok/s": "tokens_per_s",
}
_SHARES = ("mbu",)
_MEMORY = ("weights", "cache", "peak")


def _columns(settings: Record) -> dict[str, str]:
    if of_requests(settings):
        return _OF_FILE
    return _CLIPS if of_clips(settings) else _REQUESTS


def _quality(line: Record, metrics: list[str]) -> tuple[str, ...]:
    """Metrics to six digits: precisions may differ only in late ones."""
    found = [line["quality"].get(metric) for metric in metrics]
    return tuple("-" if value is None else f"{value:.6g}" for value in found)


def _series(lines: list[Record], palette: dict[str, str], x: Any) -> tuple[Series, ...]:
    return tuple(
        Series(
            line["name"],
            palette[line["name"]],
            tuple(_mark(point, x(line, point), str(point["batch"])) for point in line["points"]),
            line["kind"] == "hf",
        )
        for line in lines
    )


def _mark(point: Record, x: float, label: str) -> ChartMark:
    return ChartMark(x, speed(point), label)


def _axis(point: Record) -> str:
    return "seconds of audio/s" if "rtfx" in point["figures"] else "output tokens/s"


def _panel(
    title: str, x_label: str, y_label: str, series: tuple[Series, ...], front: set[tuple[str, int]]
) -> Panel:
    """A panel, with the Pareto line through the marks in ``front``."""
    kept = {(name, str(batch)) for name, batch in front}
    line = sorted((m.x, m.y) for one in series for m in one.marks if (one.name, m.label) in kept)
    return Panel(title, x_label, y_label, series, tuple(line))


def _quality_panel(lines: list[Record], palette: dict[str, str], best: Record) -> Panel:
    metric = best["against"]
    series = []
    for line in (line for line in lines if metric in line["quality"]):
        point = max(line["points"], key=speed)
        mark = _mark(point, line["quality"][metric], f"{line['name']}, {point['batch']}")
        series.append(Series(line["name"], palette[line["name"]], (mark,), line["kind"] == "hf"))
    names = {name for name, _ in best["points"]}
    front = sorted((one.marks[0].x, one.marks[0].y) for one in series if one.name in names)
    x_label = f"{metric} ({'lower' if lower_is_better(metric) else 'higher'} is better)"
    title = "Speed against quality, at the fastest batch size"
    return Panel(title, x_label, _axis(point), tuple(series), tuple(front))
