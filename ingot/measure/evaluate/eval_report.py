"""A record in words and tables.

Owns which figures are shown. Knows no terminal: a table is plain data.

    print("\\n".join(headline(record)))
"""

from __future__ import annotations

from typing import Any

from ingot.measure.side.text_table import Table, score

Record = dict[str, Any]
_PAIRS, _TEXT = 10, 60


def headline(record: Record) -> list[str]:
    """What the figures stand on: data, what was left out of it, both sides."""
    data, counts = record["data"], record["counts"]
    lines = [f"{data['file']}: {', '.join(_count_texts(counts))}"]
    if data["bad_lines"]:
        lines.append(f"skipped {len(data['bad_lines'])} bad lines: {_numbers(data['bad_lines'])}")
    for side in record["sides"]:
        facts = side["facts"]
        what = facts.get("class") or facts["architecture"]
        lines.append(f"{side['name']}: {side['spec']['path']}, {what}, {facts['dtype']}, {facts['device']}")
    return lines


def tables(record: Record) -> list[Table]:
    """Metrics of both sides, their speed, the differences, and of a divergence the worst positions."""
    speed = {"wer": _audio_speed, "caption": _picture_speed}.get(record["verb"], _speed)
    found = [_metrics(record), speed(record)]
    if record.get("differing"):
        found.append(_differing(record))
    if "divergence" in record:
        found.insert(0, _divergence(record["divergence"], _read_by(record)))
        found += [_worst(record["worst"])] if record["worst"] else []
    if record["deltas"]:
        found.append(_deltas(record))
    return found


def verdict(record: Record) -> str | None:
    """One line on the differences; None where nothing was compared."""
    if record["verdict"] is None:
        return None
    beyond = [delta["metric"] for delta in record["deltas"] if not delta["within"]]
    if beyond:
        return f"beyond the limit: {', '.join(beyond)}"
    return "every difference is within its limit"


def _count_texts(counts: Record) -> list[str]:
    words = {
        "cases": "items asked",
        "pictures": "pictures",
        "recordings": "recordings",
        "audio_seconds": "seconds of audio",
        "documents": "texts",
        "tokens": "tokens",
        "counted_tokens": "tokens counted",
        "windows": "windows",
        "cut": "articles cut",
        "cut_tokens": "tokens cut off",
        "too_long": "items too long",
        "too_short": "texts too short",
    }
    only_some = ("cut", "cut_tokens", "too_long", "too_short")
    shown = [k for k in words if k in counts and (counts[k] or k not in only_some)]
    return [f"{counts[k]:,} {words[k]}" for k in shown]


def _numbers(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:10]))
    return shown if len(values) <= 10 else f"{shown}, …"


def _metrics(record: Record) -> Table:
    if record["verb"] in ("summarize", "caption"):
        return _rouge(record)
    sides = record["sides"]
    rows = [
        (name.replace("_", " "), *(_figure(side["metrics"][name]) for side in sides))
        for name in sides[0]["metrics"]
    ]
    return Table(record["verb"] + _read_by(record), ("", *(side["name"] for side in sides)), tuple(rows))


def _figure(value: float | int | None) -> str:
    """A count, or a metric."""
    return f"{value:,}" if isinstance(value, int) else score(value)


def _read_by(record: Record) -> str:
    """The windows that running text was read by, without which a figure of it means nothing."""
    window, stride = (record["settings"].get(name) for name in ("window", "stride"))
    return "" if window is None else f", window {window}, stride {stride}"


def _rouge(record: Record) -> Table:
    """F1 beside precision and recall, a row for each kind and side."""
    rows = []
    for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        for side in (one for one in record["sides"] if one["metrics"]):
            values = [side["metrics"][name] for name in (kind, f"{kind}_precision", f"{kind}_recall")]
            rows.append((kind, side["name"], *map(score, values)))
    against = "" if all(side["metrics"] for side in record["sides"]) else " against the other side's"
    title = f"{record['verb']}{against}, 0 to 100"
    return Table(title, ("", "side", "F1", "precision", "recall"), tuple(rows))


def _speed(record: Record) -> Table:
    rows = [
        (
            side["name"],
            score(side["seconds"]),
            f"{side['input_tokens']:,}",
            f"{side['output_tokens']:,}",
            score(side["input_tokens_per_s"]),
            score(side["output_tokens_per_s"]),
        )
        for side in record["sides"]
    ]
    columns = ("", "seconds", "tokens in", "tokens out", "in/s", "out/s")
    same = record.get("agreement")
    agreement = "" if same is None else f"; {same['same_tokens']} of {same['answers']} answers are the same"
    return Table(f"time{agreement}", columns, tuple(rows))


def _audio_speed(record: Record) -> Table:
    rows = [
        (side["name"], str(side["facts"]["batch"]), score(side["seconds"]), score(side["rtfx"]))
        for side in record["sides"]
    ]
    same = record["agreement"]
    agreement = "" if same is None else f"; {same['same_text']} of {same['answers']} transcripts are the same"
    return Table(f"time{agreement}", ("", "at once", "seconds", "RTFx"), tuple(rows))


def _picture_speed(record: Record) -> Table:
    rows = [
        (
            side["name"],
            score(side["seconds"]),
            score(side["pictures_per_s"]),
            f"{side['output_tokens']:,}",
            score(side["output_tokens_per_s"]),
        )
        for side in record["sides"]
    ]
    same = record["agreement"]
    agreement = "" if same is None else f"; {same['same_text']} of {same['answers']} captions are the same"
    return Table(f"time{agreement}", ("", "seconds", "pictures/s", "tokens out", "out/s"), tuple(rows))


def _differing(record: Record) -> Table:
    """The first transcripts or captions that differ; the record has all."""
    names = [side["name"] for side in record["sides"]]
    rows = [
        (str(row["id"] or row["number"]), *(_shown(row[name]["text"], _TEXT) for name in names))
        for row in record["differing"][:_PAIRS]
    ]
    kind = "captions" if record["verb"] == "caption" else "transcripts"
    return Table(f"{kind} that differ", ("item", *names), tuple(rows))


def _deltas(record: Record) -> Table:
    rows = [
        (
            delta["metric"].replace("_", " "),
            score(delta["delta"]),
            score(delta["stderr"]),
            f"{delta['limit']:g} {delta['unit']}",
            "within" if delta["within"] else "BEYOND",
        )
        for delta in record["deltas"]
    ]
    return Table("differences", ("", "difference", "std error", "limit", ""), tuple(rows))


def _divergence(measured: Record, read_by: str) -> Table:
    rows = [(name.replace("_", " "), score(value)) for name, value in measured.items()]
    title = f"divergence{read_by}: KL(reference || engine) in nats, agreement in percent"
    return Table(title, ("", ""), tuple(rows))


def _worst(positions: list[Record]) -> Table:
    rows = [
        (
            _shown(one["before"], 40),
            _token(one["next"]),
            _token(one["expected"]["engine"]),
            _token(one["expected"]["reference"]),
            score(one["kl"]),
            f"{one['number']}:{one['position']}",
        )
        for one in positions
    ]
    columns = ("after", "next token", "engine expects", "reference expects", "KL", "item:token")
    return Table("the positions that differ most", columns, tuple(rows))


def _token(token: Record) -> str:
    return str(token["token_id"]) if token["text"] is None else repr(token["text"])


def _shown(text: str | None, most: int) -> str:
    line = "" if text is None else text.replace("\n", "⏎")
    return line if len(line) <= most else "…" + line[1 - most :]
