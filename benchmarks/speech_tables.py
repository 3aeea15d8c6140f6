"""Tables of models that hear, as Markdown.

Owns what stands in which row and column. Knows nothing of pages (``figures.py``).

    print(SPEECH_TABLES["pocket-speech"]())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.figures import value_at as of
from benchmarks.tables import Row, markdown

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
    "products": ("nvjet", "few_linear", "splitK", "small_linear", "gemm", "cutlass"),
    "norms with their sums": ("layer_norm",),
    "GELU": ("Gelu",),
    "keys and values into the cache": ("kv_write",),
    "rules, the likeliest token, its log-probability": ("transcript", "tile_", "likeliest", "pick_token"),
}
REST = "embeddings, copies"


def speech_step() -> str:
    """docs/speech.md: where the time of a decode step goes, by kind of kernel."""
    steps = {}
    for name in ("small", "large-v3"):
        found = of(f"whisper/{name}.fp16.h100.json")["step"]
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


SPEECH_TABLES: dict[str, Callable[[], str]] = {"pocket-speech": pocket_speech, "speech-step": speech_step}
