"""A record as lines and tables."""

from __future__ import annotations

from typing import Any

from ingot.measure.evaluate.rouge import KINDS
from ingot.measure.side.text_table import Table, score

Record = dict[str, Any]
_DENSE = "none"
_PAIRS, _TEXT = 10, 60
_COUNTS = {
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
_ONLY_SOME = ("cut", "cut_tokens", "too_long", "too_short")  # not shown where they are 0
_ANSWERS = {"wer": "transcripts", "caption": "captions"}  # of other verbs "answers"
_SPEED = {  # title → key of a side, by verb
    "wer": {"at once": "batch", "seconds": "seconds", "RTFx": "rtfx"},
    "caption": {
        "seconds": "seconds",
        "pictures/s": "pictures_per_s",
        "tokens out": "output_tokens",
        "out/s": "output_tokens_per_s",
    },
}
_TEXT_SPEED = {
    "seconds": "seconds",
    "tokens in": "input_tokens",
    "tokens out": "output_tokens",
    "in/s": "input_tokens_per_s",
    "out/s": "output_tokens_per_s",
}


def headline(record: Record) -> list[str]:
    """The data, what was left out of it, and both sides."""
    data, counts = record["data"], record["counts"]
    shown = [k for k in _COUNTS if k in counts and (counts[k] or k not in _ONLY_SOME)]
    lines = [f"{data['file']}: {', '.join(f'{counts[k]:,} {_COUNTS[k]}' for k in shown)}"]
    if data["bad_lines"]:
        more = ", …" if len(data["bad_lines"]) > 10 else ""
        numbers = ", ".join(map(str, data["bad_lines"][:10]))
        lines.append(f"skipped {len(data['bad_lines'])} bad lines: {numbers}{more}")
    for side in record["sides"]:
        facts = side["facts"]
        what = facts.get("class") or facts["architecture"]
        lines.append(f"{side['name']}: {side['spec']['path']}, {what}, {facts['dtype']}, {facts['device']}")
    return lines


def tables(record: Record) -> list[Table]:
    """Metrics of both sides, their speed, the differences, and of a divergence the worst positions."""
    scored = record["verb"] in ("summarize", "caption")
    found = [_rouge(record) if scored else _metrics(record), _speed(record)]
    if record["verb"] == "summarize":
        found.insert(0, _precisions(record))
    if record.get("differing"):  # the first of them: the record has all
        names = [side["name"] for side in record["sides"]]
        rows = [
            (str(row["id"] or row["number"]), *(_shown(row[name]["text"], _TEXT) for name in names))
            for row in record["differing"][:_PAIRS]
        ]
        found.append(Table(f"{_ANSWERS[record['verb']]} that differ", ("item", *names), tuple(rows)))
    if "divergence" in record:
        rows = [(name.replace("_", " "), score(value)) for name, value in record["divergence"].items()]
        title = f"divergence{_read_by(record)}: KL(reference || engine) in nats, agreement in percent"
        found.insert(0, Table(title, ("", ""), tuple(rows)))
        found += [_worst(record["worst"])] if record["worst"] else []
    if record["deltas"]:
        found.append(_deltas(record))
    if record.get("bounds"):
        found.append(_bounds(record))
    return found


def verdict(record: Record) -> str | None:
    """A line on the differences and one on the bounds; None where there is neither."""
    lines = []
    beyond = [delta["metric"] for delta in record["deltas"] if not delta["within"]]
    if beyond:
        lines.append(f"beyond the limit: {', '.join(beyond)}")
    elif record["deltas"]:
        lines.append("every difference is within its limit")
    several = len({bound["side"] for bound in record.get("bounds", ())}) > 1
    missed = [
        f"{bound['metric']} of {bound['side']}" if several else bound["metric"]
        for bound in record.get("bounds", ())
        if not bound["met"]
    ]
    if missed:
        lines.append(f"not good enough: {', '.join(missed)}")
    elif record.get("bounds"):
        lines.append("every score is within its bound")
    return "\n".join(lines) or None


def _metrics(record: Record) -> Table:
    sides = record["sides"]
    rows = [
        (name.replace("_", " "), *(_figure(side["metrics"][name]) for side in sides))
        for name in sides[0]["metrics"]
    ]
    return Table(record["verb"] + _read_by(record), ("", *(side["name"] for side in sides)), tuple(rows))


def _figure(value: float | int | None) -> str:
    return f"{value:,}" if isinstance(value, int) else score(value)


def _read_by(record: Record) -> str:
    """The windows that running text was read in."""
    window, stride = (record["settings"].get(name) for name in ("window", "stride"))
    return "" if window is None else f", window {window}, stride {stride}"


def _precisions(record: Record) -> Table:
    """Each side's precision with its F1 of every kind and its seconds."""
    rows = []
    for side in record["sides"]:
        facts = side["facts"]
        scheme = facts.get("quantization", _DENSE)
        precision = facts["dtype"] if scheme == _DENSE else scheme
        figures = [score(side["metrics"][kind]) for kind in KINDS]
        rows.append((side["name"], precision, *figures, f"{side['seconds']:.2f}"))
    title = f"{record['verb']}: F1, 0 to 100, and seconds"
    return Table(title, ("", "precision", *KINDS, "seconds"), tuple(rows))


def _rouge(record: Record) -> Table:
    rows = []
    for kind in KINDS:
        for side in (one for one in record["sides"] if one["metrics"]):
            values = [side["metrics"][name] for name in (kind, f"{kind}_precision", f"{kind}_recall")]
            rows.append((kind, side["name"], *map(score, values)))
    against = "" if all(side["metrics"] for side in record["sides"]) else " against the other side's"
    title = f"{record['verb']}{against}, 0 to 100"
    return Table(title, ("", "side", "F1", "precision", "recall"), tuple(rows))


def _speed(record: Record) -> Table:
    columns = _SPEED.get(record["verb"], _TEXT_SPEED)
    sides = [side | {"batch": side["facts"].get("batch")} for side in record["sides"]]
    rows = [(side["name"], *(_figure(side[key]) for key in columns.values())) for side in sides]
    same, answers = record.get("agreement"), _ANSWERS.get(record["verb"])
    agreement = ""
    if same is not None:
        count = same["same_text" if answers else "same_tokens"]
        agreement = f"; {count} of {same['answers']} {answers or 'answers'} are the same"
    return Table(f"time{agreement}", ("", *columns), tuple(rows))


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


def _bounds(record: Record) -> Table:
    rows = []
    for bound in record["bounds"]:
        value = "none" if bound["score"] is None else f"{bound['score']:.6g}"
        least = "at least" if bound["better"] == "higher" else "at most"
        met = "within" if bound["met"] else "BEYOND"
        row = (bound["metric"].replace("_", " "), value, f"{least} {bound['value']:g}", met)
        rows.append((bound["side"], *row))
    names = {row[0] for row in rows}
    if len(names) > 1:
        return Table("bounds", ("", "", "score", "bound", ""), tuple(rows))
    return Table(f"bounds of {rows[0][0]}", ("", "score", "bound", ""), tuple(row[1:] for row in rows))


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
