"""The tables of the 8B shapes beside vLLM, as Markdown, from docs/results/beside_vllm.

print(SHAPE_TABLES["beside-vllm"]())
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.result_values import RESULTS, significant
from benchmarks.result_values import value_at as of
from benchmarks.tables import Row, markdown

SHAPES_8B = {"llama31-8b": "Llama-3.1-8B", "qwen3-8b": "Qwen3-8B"}
SIDES = {
    "vllm": "vLLM 0.22.1, bf16",
    "none": "Ingot, bf16",
    "w8a16": "Ingot, w8a16",
    "w4a16": "Ingot, w4a16",
    "w8a8": "Ingot, w8a8",
}
WORKS = {  # what a row shows → the work and its figure in a file
    "next token, 1 request": ("b1", "decode_ms"),
    "next token, 8 requests": ("b8", "decode_ms"),
    "next token, 64 requests": ("b64", "decode_ms"),
    "next token, 32 requests, top-k, top-p, penalty": ("b32_qwen_sampling", "decode_ms"),
    "next token, 32 requests, 5 log-probabilities": ("b32_logprobs", "decode_ms"),
    "next token, 8 requests after 16,000 tokens": ("b8_16k", "decode_ms"),
    "first token, 64 prompts of 512 tokens": ("b64", "ttft_ms"),
    "first token, a prompt of 16,000 tokens": ("b1_16k", "ttft_ms"),
    "first token, 8 prompts of 16,000 tokens": ("b8_16k", "ttft_ms"),
}
MIXED = "256 mixed requests, output tokens/s"


def records(shape: str) -> dict[str, Row]:
    """The files of a shape that are there, by side."""
    names = {side: f"beside_vllm/{shape}.{side}.json" for side in SIDES}
    return {side: of(name) for side, name in names.items() if (RESULTS / name).exists()}


def headline() -> str:
    """Llama-3.1-8B by every side, medians."""
    found = records("llama31-8b")
    rows = [
        [f"{row}, ms", *(significant(one["results"][work][figure]["p50"]) for one in found.values())]
        for row, (work, figure) in WORKS.items()
    ]
    rows.append([MIXED, *(f"{one['results']['mixed_tok_s']['p50']:,.0f}" for one in found.values())])
    return markdown([SHAPES_8B["llama31-8b"], *(SIDES[side] for side in found)], rows)


def beside_vllm() -> str:
    """Both shapes by every side: median, p90, least to most."""
    parts = []
    for shape, name in SHAPES_8B.items():
        found = records(shape)
        rows = [
            [row, *(_spread(one["results"][work][figure]) for one in found.values())]
            for row, (work, figure) in WORKS.items()
        ]
        rows.append([MIXED, *(_rate(one["results"].get("mixed_tok_s")) for one in found.values())])
        head = [f"{name}: ms, median (p90; least to most)", *(SIDES[side] for side in found)]
        parts.append(markdown(head, rows))
    return "\n\n".join([*parts, _machines()])


def _spread(times: Row) -> str:
    p50, p90, least, most = (significant(times[name]) for name in ("p50", "p90", "least", "most"))
    return f"**{p50}** ({p90}; {least} to {most})"


def _rate(rates: Row | None) -> str:
    """Of a run that was cut off before its last work: nothing."""
    if rates is None:
        return ""
    return f"**{rates['p50']:,.0f}** ({rates['least']:,.0f} to {rates['most']:,.0f})"


def _machines() -> str:
    """GPUs, commit, torch and ceilings of the processes, in a sentence."""
    found = [(shape, side, one) for shape in SHAPES_8B for side, one in records(shape).items()]
    machines = [one["machine"] for _, _, one in found]
    made = {f"{one['gpu']}, commit {one['commit']}, torch {one['torch']}" for one in machines}
    cards = {one["card"] for _, _, one in found}
    ceilings = [one["ceiling"] for _, _, one in found if one["ceiling"]]
    reads, products = (sorted(one[key] for one in ceilings) for key in ("read_gb_s", "matmul_tflop_s"))
    return (
        f"`results/beside_vllm/`: {'; '.join(sorted(made))}, {len(cards)} cards. Before each of"
        f" Ingot's runs the card read {reads[0]:,.0f} to {reads[-1]:,.0f} GB/s and multiplied bf16"
        f" matrices of 8192 x 8192 at {products[0]:.0f} to {products[-1]:.0f} TFLOP/s."
    )


SHAPE_TABLES: dict[str, Callable[[], str]] = {"headline-8b": headline, "beside-vllm": beside_vllm}
