"""The record of ``ingot profile`` in words and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ingot.measure.side.text_table import Table, counted, number, percent, score, times

Record = dict[str, Any]
MOST_KERNELS = 4  # of a module; the others are one row
_MOST_NAME = 60  # characters of a kernel's name


def profile_headline(record: Record) -> list[str]:
    """What a step had, how long it took, and where the device waited."""
    (side,) = record["sides"]
    (result,) = side["results"]
    found = result["kernels"]
    what = "kernel" if _on_gpu(record) else "operator"
    lines = [
        f"{side['name']}: {side['facts']['dtype']}, {_what(result)}",
        f"launched one by one: {number(result['step_ms']['p50'])} ms; "
        f"under the profiler {_waits(found, what)}",
    ]
    if (graph := result["graph"]) is not None:
        ms = number(graph["step_ms"]["p50"])
        lines.append(f"as a CUDA graph: {ms} ms; under the profiler {_waits(graph, what)}")
    elif _on_gpu(record):
        lines.append("no CUDA graph is as large as this step: it is served as it is launched here")
    return lines


def profile_tables(record: Record) -> list[Table]:
    """A table of modules and their kernels, one of the operations that were left out, and one of answers."""
    (side,) = record["sides"]
    (result,) = side["results"]
    on_gpu = _on_gpu(record)
    columns = ("module" if on_gpu else "module, operator", "launches", "µs", "share", "GB/s", "TFLOP/s")
    rows = tuple(row for module in result["kernels"]["modules"] for row in _module(module))
    what = "kernels" if on_gpu else "PyTorch's operators"
    found = [Table(f"{what} of one {result['step']} step", (*columns, "of ceiling"), rows)]
    if result["without"]:
        found.append(_without(result["without"], fuses=result["fused"]))
    if result.get("data") is not None:
        found.append(_answers(result["without"]))
    return found


def _on_gpu(record: Record) -> bool:
    return "gpu" in record["machine"]


def _what(result: Record) -> str:
    """``decode step of 8 requests, 8 tokens, 4,096 in the cache``."""
    if result["step"] == "encode":
        inputs = counted(result["inputs"], "input")
        return f"encode step of {inputs}, {counted(result['positions'], 'position')}"
    mixed = f" ({result['decodes']} decode)" if result["step"] == "mixed" else ""
    requests = f"{counted(result['requests'], 'request')}{mixed}"
    tokens = counted(result["tokens"], "token")
    return f"{result['step']} step of {requests}, {tokens}, {result['cached_tokens']:,} in the cache"


def _waits(found: Record, what: str) -> str:
    gaps = found["gaps"]
    text = (
        f"{number(found['busy_us'] / 1e3)} ms in {counted(found['launches'], what)}, "
        f"{number(gaps['us'] / 1e3)} ms ({percent(gaps['share'])}) in {counted(gaps['count'], 'gap')}"
    )
    if gaps["longest_before"] is None:
        return text
    return f"{text}, the longest {number(gaps['longest_us'])} µs before {gaps['longest_before']}"


def _module(module: Record) -> Iterator[tuple[str, ...]]:
    share = module["share_of_ceiling"]
    yield (
        module["module"],
        *_time(module),
        number(module["gb_s"]),
        number(module["tflop_s"]) if module["tflop_s"] else "-",
        "-" if share is None else f"{percent(share)} {module['bound']}",
    )
    kernels = module["kernels"]
    shown = kernels if len(kernels) <= MOST_KERNELS + 1 else kernels[:MOST_KERNELS]
    for kernel in shown:
        yield (f"  {_short(kernel['kernel'])}", *_time(kernel), "", "", "")
    if rest := kernels[len(shown) :]:
        total = {name: sum(one[name] for one in rest) for name in ("launches", "us", "share")}
        yield (f"  {len(rest)} others", *_time(total), "", "", "")


def _time(entry: Record) -> tuple[str, ...]:
    return f"{entry['launches']:g}", number(entry["us"]), percent(entry["share"])


def _short(name: str) -> str:
    return name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"


def _without(entries: list[Record], *, fuses: bool) -> Table:
    """``fuses``: whether the step has fused kernels; then a row without them says so."""
    rows = tuple(
        (
            entry["operation"] if entry["fused"] or not fuses else f"{entry['operation']}, unfused",
            "all" if entry["replaced_calls"] is None else str(entry["replaced_calls"]),
            number(entry["with"]["kernels_us"] / 1e3),
            number(entry["without"]["kernels_us"] / 1e3),
            times(entry["kernels_ratio"]),
            number(entry["with"]["step_ms"]["p50"]),
            number(entry["without"]["step_ms"]["p50"]),
            times(entry["step_ratio"]),
            score(entry["largest_difference"]),
            score(entry["largest_output"]),
            f"{entry['same_choices']} of {entry['choices']}" if entry["choices"] else "-",
        )
        for entry in entries
    )
    title = "PyTorch's operators in a kernel's place; both sides without CUDA graphs"
    times_of = ("kernels ms", "without", "ratio", "step ms", "without", "ratio")
    outputs = ("outputs differ by", "largest output", "same choice")
    return Table(title, ("without", "calls", *times_of, *outputs), rows)


def _answers(entries: list[Record]) -> Table:
    """ROUGE of the answers, F1, with each kernel and without."""
    kinds = {"rouge1": "1", "rouge2": "2", "rougeL": "L"}
    rows = []
    for entry in entries:
        found = entry["answers"]
        figures = [score(found[side][kind]) for kind in kinds for side in ("with", "without")]
        same = percent(found["same_tokens"] / found["answers"])
        rows.append((entry["operation"], *figures, same))
    columns = [name for kind in kinds.values() for name in (f"ROUGE-{kind}", f"{kind} without")]
    title = f"ROUGE of {counted(entries[0]['answers']['answers'], 'answer')} with and without each kernel, F1"
    return Table(title, ("without", *columns, "same answers"), tuple(rows))
