"""The table of the 8B shapes, as Markdown, from docs/results/shapes_8b.

print(SHAPE_TABLES["shapes-8b"]())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.result_values import significant
from benchmarks.result_values import value_at as of
from benchmarks.tables import BATCHES, LABELS, NONE, Row, markdown

SHAPES_8B = {"qwen3-8b": "Qwen3-8B", "llama31-8b": "Llama-3.1-8B"}
SCHEMES_8B = {"none": "bf16", **{name: LABELS[name] for name in ("w8a16", "w4a16", "w8a8")}}


def shapes_8b() -> str:
    """The 8B shapes: decode steps beside the bandwidth's, and the first token of one request."""
    rows = []
    records = []
    for shape, name in SHAPES_8B.items():
        for scheme, label in SCHEMES_8B.items():
            record = of(f"shapes_8b/{shape}.{scheme}.json")
            firsts = significant(record["latency"][0]["ttft_ms"]["p50"])
            steps = [_with_ends(entry["decode_ms"]) for entry in record["latency"]]
            rows.append([f"{name}, {label}", *steps, firsts])
            records.append(record)
        floors = [significant(entry["floor_ms"]) for entry in of(f"shapes_8b/{shape}.none.json", "latency")]
        rows.append([f"{name}, what the memory's bandwidth allows, bf16", *floors, NONE])
    head = ["ms: median (least to most)", *(f"batch {b}" for b in BATCHES), "TTFT, batch 1"]
    return f"{markdown(head, rows)}\n\n{_runs(records)}"


def _with_ends(times: Row) -> str:
    """A median, and from least to most."""
    return f"**{significant(times['p50'])}** ({significant(times['least'])} to {significant(times['most'])})"


def _runs(records: Sequence[Row]) -> str:
    """GPU, commit, torch and bandwidth of the 8B shapes' processes, in a sentence."""
    machines = [record["machine"] for record in records]
    made = {f"{one['gpu']}, commit {one['commit']}, torch {one['torch']}" for one in machines}
    reads = [record["ceiling"]["read_gb_s"] for record in records]
    return (
        f"`results/shapes_8b/`: {'; '.join(sorted(made))}; reads {min(reads):,.0f} to {max(reads):,.0f} GB/s."
    )


SHAPE_TABLES: dict[str, Callable[[], str]] = {"shapes-8b": shapes_8b}
