"""The processes of a headline run joined into one file, from which README and docs/benchmarks.md are written.

The runs of all rounds of a scheme give median, p90, least and most; each round's median stands beside them.

    python benchmarks/headline_table.py docs/results/headline     # writes docs/results/headline.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot.measure.side.timed_run import median, spread

Row = dict[str, Any]
MACHINE = ("gpu", "python", "torch", "triton", "cuda", "ingot")


def joined(folder: Path) -> Row:
    """All files ``SCHEME.ROUND.json`` of a folder as one table.

    Raises:
        ValueError: they are of more than one machine, or there are none.
    """
    files = sorted(folder.glob("*.*.json"), key=lambda file: int(file.suffixes[0][1:]))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    machines = [{name: record["machine"].get(name) for name in MACHINE} for record in records]
    if not machines or any(one != machines[0] for one in machines):
        raise ValueError(f"{folder}: files of one machine are needed; seen: {machines}")
    by_scheme: dict[str, list[Row]] = {}
    for file, record in zip(files, records, strict=True):
        by_scheme.setdefault(file.name.split(".")[0], []).append(record)
    reads = [record["ceiling"]["read_gb_s"] for record in records]
    return {
        "commits": sorted({record["machine"]["commit"] for record in records}),
        "machine": machines[0],
        "read_gb_s": spread(reads),
        "schemes": {scheme: _scheme(rounds) for scheme, rounds in sorted(by_scheme.items())},
    }


def _scheme(rounds: Sequence[Row]) -> Row:
    """Decode and TTFT by batch, prefill, mixed load: milliseconds, but tokens per second of the load."""
    found: Row = {"rounds": len(rounds), "commands": [record["command"] for record in rounds]}
    batches = [entry["batch"] for entry in rounds[0].get("latency", [])]
    for place, batch in enumerate(batches):
        entries = [record["latency"][place] for record in rounds]
        steps = [_steps(entry) for entry in entries]
        firsts = [entry["seconds_of_runs"]["one_new"] for entry in entries]
        decode = found.setdefault("decode", {})[str(batch)] = _over(steps)
        decode["floor"] = round(median([entry["floor_ms"] for entry in entries]), 4)
        decode["mbu"] = round(decode["floor"] / decode["p50"], 4)
        found.setdefault("ttft", {})[str(batch)] = _over(firsts)
    if prefills := [record["prefill"] for record in rounds if "prefill" in record]:
        found["prefill"] = _over([entry["seconds_of_runs"]["one_new"] for entry in prefills])
    if loads := [record["mixed"] for record in rounds if "mixed" in record]:
        rates = [[entry["new_tokens"] / s for s in entry["seconds_of_runs"]["load"]] for entry in loads]
        found["mixed"] = _over(rates, 1.0)
    return found


def _steps(entry: Row) -> list[float]:
    """Seconds of a decode step in each run: (time of N new tokens - time of 1) / (N - 1)."""
    runs, new = entry["seconds_of_runs"], entry["new_tokens"]
    return [(w - f) / (new - 1) for f, w in zip(runs["one_new"], runs["all_new"], strict=True)]


def _over(rounds: Sequence[Sequence[float]], scale: float = 1e3) -> Row:
    """The spread of all runs, how many there are, and the median of each round."""
    runs = [value for one in rounds for value in one]
    figures: Row = dict(spread(runs, scale) or {})
    return figures | {"runs": len(runs), "medians": [round(median(one) * scale, 4) for one in rounds]}


def write(folder: Path) -> None:
    """The joined file, beside the folder."""
    text = json.dumps(joined(folder), indent=1) + "\n"
    folder.with_suffix(".json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
