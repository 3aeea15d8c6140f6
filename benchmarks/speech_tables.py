"""Tables of models that hear, as Markdown.

print(SPEECH_TABLES["pocket-speech"]())
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from benchmarks.result_values import RESULTS
from benchmarks.result_values import value_at as of
from benchmarks.tables import Row, at, markdown

SWEEP = "sweep_pocket_whisper/sweep.json"
LINES = {
    "Hugging Face fp32": "Hugging Face, fp32",
    "fp32": "fp32",
    "bf16": "bf16",
    "fp32 int8 cache": "fp32, keys and values in int8",
    "fp32 w8a16": "w8a16",
    "fp32 w8a8": "w8a8",
    "fp32 encoder=w8a8": "w8a8, encoder alone",
    "fp32 decoder=w8a8": "w8a8, decoder alone",
    "fp32 w4a16": "w4a16",
    "fp32 encoder=w4a16": "w4a16, encoder alone",
    "fp32 decoder=w4a16": "w4a16, decoder alone",
}


def pocket_speech() -> str:
    """docs/speech.md: word error rates of the pocket speech model by precision."""
    lines = {line["name"]: line for line in of(SWEEP)["lines"]}
    assert lines.keys() == LINES.keys()
    rows = []
    for name, shown in LINES.items():
        memory = lines[name]["points"][0]["memory"]
        sizes = (f"{1000 * memory[key]:.1f}" for key in ("weights_gb", "cache_gb"))
        rows.append([shown, f"{lines[name]['quality']['wer']:.2f}", *sizes])
    return markdown(["precision", "WER, %", "weights, MB", "caches of 8 windows, MB"], rows)


GROUPS = {
    "attention to the encoder's outputs and to tokens": ("attention",),
    "products": ("nvjet", "few_", "splitK", "gemm", "cutlass"),
    "norms with their sums": ("norm_kernel",),
    "GELU": ("Gelu",),
    "keys and values into the cache": ("kv_write",),
    "rules, the likeliest token, its log-probability": ("transcript", "tile_", "likeliest", "pick_token"),
}
REST = "embeddings, copies"


def speech_step() -> str:
    """docs/speech.md: where the time of a decode step goes, by kind of kernel."""
    steps = {}
    for name in ("small", "large-v3"):
        found = of(f"whisper/step/{name}.fp16.h100.json")["step"]
        steps |= {f"{name}, {rows} row{'s' * (rows != '1')}": _grouped(found[rows]) for rows in ("1", "64")}
    rows = [
        [group, *(f"{step[group][1]:,.0f}: {step[group][0]:.0f}" for step in steps.values())]
        for group in (*GROUPS, REST)
    ]
    rows.append(["all", *(f"{sum(us for _, us in step.values()):,.0f}" for step in steps.values())])
    return markdown(["µs: launches", *steps], rows)


def _grouped(kernels: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Launches and µs by group."""
    found = dict.fromkeys((*GROUPS, REST), (0.0, 0.0))
    for one in kernels:
        group = next((g for g, names in GROUPS.items() if any(n in one["kernel"] for n in names)), REST)
        launches, us = found[group]
        found[group] = launches + one["launches"], us + one["us"]
    return found


PRECISIONS = {
    "fp16": "fp16",
    "fp32": "fp32",
    "fp16.int8": "fp16, keys and values in int8",
    "fp16.w8a16": "w8a16",
    "fp16.w8a8": "w8a8",
    "fp16.w8a8.int8": "w8a8, keys and values in int8",
    "fp16.encoder=w8a8": "w8a8, encoder alone",
    "fp16.decoder=w8a8": "w8a8, decoder alone",
}
SIZES = ("tiny", "base", "small", "medium", "large-v3", "large-v3-turbo")


def _records(folder: str, precisions: Sequence[str]) -> Iterator[tuple[str, str, Row]]:
    """(size, precision, record) of what has been measured."""
    for size, precision in itertools.product(SIZES, precisions):
        name = f"{folder}/{size}.{precision}.h100.json"
        if (RESULTS / name).exists():
            yield size, precision, of(name)


def speech_windows() -> str:
    """docs/speech.md: windows of 30 seconds with 50 tokens, one and 64 at once."""
    rows = []
    for size, precision, found in _records("whisper", list(PRECISIONS)):
        many = [at(found, "windows", key) for key in ("windows_per_s", "rtfx")]
        rows.append([size, PRECISIONS[precision], at(found, "window", "all_s", "p50"), *many])
    return markdown(["", "", "one window, s", "64 at once, windows/s", "RTFx of 64"], rows)


def speech_hugging_face() -> str:
    """docs/speech.md: the same windows beside Hugging Face."""
    rows = []
    for size, precision, found in _records("whisper/hf", ("fp16", "fp32")):
        row = [size, PRECISIONS[precision]]
        for part in ("window", "windows"):
            mine, its = (side[part]["all_s"]["p50"] for side in (found, found["hf"]))
            row += [f"{mine:.4f}", f"{its:.3f}", f"{its / mine:.1f}x"]
        rows.append(row)
    sides = ["Ingot, s", "Hugging Face, s", ""]
    head = [f"{part}: {side}" if side else "" for part in ("one window", "64 windows") for side in sides]
    return markdown(["", "", *head], rows)


def speech_clips() -> str:
    """docs/benchmarks.md: ``ingot bench transcribe``, one clip after another and 64 at once."""
    rows = []
    for size, precision, found in _records("clips", ("fp16", "fp32")):
        row = [size, PRECISIONS[precision]]
        ours, theirs = (side["results"] for side in found["sides"])
        for own, other in zip(ours, theirs, strict=True):
            mine, its = own["seconds"]["p50"], other["seconds"]["p50"]
            row += [f"{mine:.2f}", f"{its:.1f}", f"{its / mine:.1f}x"]
        rows.append([*row, f"{ours[-1]['rtfx']:,.0f}"])
    sides = ["Ingot, s", "Hugging Face, s", ""]
    head = ["", "", *(f"batch {batch}: {side}" if side else "" for batch in (1, 64) for side in sides)]
    return markdown([*head, "RTFx of 64"], rows)


SPEECH_TABLES: dict[str, Callable[[], str]] = {
    "pocket-speech": pocket_speech,
    "speech-step": speech_step,
    "speech-windows": speech_windows,
    "speech-hugging-face": speech_hugging_face,
    "speech-clips": speech_clips,
}
