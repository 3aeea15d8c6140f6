"""Tables of models that hear, as Markdown.

Owns what stands in which row and column. Knows nothing of pages (``figures.py``).

    print(SPEECH_TABLES["pocket-speech"]())
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.figures import value_at as of
from benchmarks.tables import markdown

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


SPEECH_TABLES: dict[str, Callable[[], str]] = {"pocket-speech": pocket_speech}
