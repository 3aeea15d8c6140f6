"""The tables of the docs of quality, as Markdown, from the records of evaluations.

print(QUALITY_TABLES["weights"]())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.result_values import value_at as of
from benchmarks.tables import NONE, made_by, markdown

Row = dict[str, Any]
POCKET, RPTQ = "pocket_quality.json", "pocket_rptq.json"
DISTANCE = ("", "KL, nats", "99th percentile", "other top-1, %")
GROUPS = {"32": "group 32", "64": "group 64", "128": "**group 128**", "0": "one scale per row"}


def engines(file: str = POCKET) -> dict[str, Row]:
    """Every engine that was measured, by name."""
    found: dict[str, Row] = of(file, "engines")
    return found


def small(value: float) -> str:
    """1.5e-03, and 0 for 0."""
    return "0" if value == 0 else f"{value:.1e}"


def distance(names: dict[str, str], file: str = POCKET) -> str:
    """A row of KL, top-1 and perplexity for each engine, by its label."""
    rows = []
    for name, label in names.items():
        one = engines(file)[name]
        shares = [small(one["kl_mean"]), small(one["kl_p99"]), f"{one['top1_disagreement']:.1f}"]
        rows.append([label, *shares, f"{one['perplexity']:.3f}"])
    dense = engines(file)["none"]["perplexity"]
    return f"{markdown([*DISTANCE, f'perplexity (dense: {dense:.3f})'], rows)}\n\n{made_by(file)}"


def weights() -> str:
    """Weights alone in fewer bits: by rounding, AWQ and GPTQ."""
    formats = {"w8a16": "w8a16"}
    formats |= {f"w4a16 {group}": f"w4a16, {label}" for group, label in GROUPS.items()}
    formats["w4a16 128 symmetric"] = "w4a16, group 128, symmetric"

    def cell(name: str) -> str:
        one = engines().get(name)
        if one is None:
            return NONE
        return f"{small(one['kl_mean'])} ({small(one['kl_p99'])}; {one['top1_disagreement']:.1f})"

    rows = [
        [label, *(cell(f"{name} {method}") for method in ("round", "awq", "gptq"))]
        for name, label in formats.items()
    ]
    rows.insert(1, ["w8a16, the head too", cell("w8a16 head"), NONE, NONE])
    head = ["KL, nats (99th percentile; other top-1, %)", "rounding", "AWQ", "GPTQ"]
    return f"{markdown(head, rows)}\n\n{made_by(POCKET)}"


def caches() -> str:
    """KV caches in 8 bits."""
    return distance(
        {
            "none int8": "int8 cache",
            "none fp8": "fp8 cache",
            "w8a16 round": "w8a16",
            "w8a16 round int8": "w8a16, int8 cache",
        }
    )


def w8a8() -> str:
    """Weights and activations in 8 bits."""
    names = {
        "w8a16 round": "w8a16",
        "w8a8": "**w8a8, dynamic**",
        "w8a8 tensor": "… one weight scale per layer",
    }
    for how in ("dynamic", "static"):
        if how == "static":
            names["w8a8 static"] = "w8a8, static"
        for alpha in ("0.5", "0.7", "search"):
            label = "α searched" if alpha == "search" else f"α {alpha}"
            names[f"w8a8 {how} smoothquant {alpha}"] = f"… SmoothQuant, {label}"
    return distance(names)


def w4a8() -> str:
    """Weights in 4 bits inside numbers of 8, activations in 8."""
    names = {}
    for method, title in (("round", "w4a8"), ("gptq", "w4a8 by GPTQ")):
        for group in ("128", "64"):
            for turned in ("", " rotated"):
                label = title + (", group 64" if group == "64" else "") + ("" if turned else ", not rotated")
                names[f"w4a8 {group} {method}{turned}"] = label
    return distance(names)


def rptq() -> str:
    """Static activations by blocks of reordered channels: blocks, and ways to measure ranges."""
    rows = [
        *(("rptq-w8a8", 128, "ema-minmax"), ("rptq-w8a8", 128, "minmax"), ("rptq-w8a8", 32, "minmax")),
        *(("rptq-w4a8", 128, "ema-minmax"), ("rptq-w4a4", 128, "ema-minmax")),
        *(("rptq-w4a4", 128, "mse"), ("rptq-w4a4", 32, "mse")),
    ]
    names = {
        f"{scheme} {block} {ranges} -": f"{scheme}, blocks of {block}, {ranges}"
        for scheme, block, ranges in rows
        if f"{scheme} {block} {ranges} -" in engines(RPTQ)
    }
    return distance(names, RPTQ)


SITES = {
    "none": "none",
    "rptq-w4a8 128 ema-minmax -": "all four in 8 bits: rptq-w4a8",
    "rptq-w4a4 128 ema-minmax R3,R4,R5": "R1 alone in 4 bits",
    "rptq-w4a4 128 ema-minmax R1,R4,R5": "R3 alone in 4 bits",
    "rptq-w4a4 128 ema-minmax R1,R3,R5": "R4 alone in 4 bits",
    "rptq-w4a4 128 ema-minmax R1,R3,R4": "R5 alone in 4 bits",
    "rptq-w4a4 128 ema-minmax -": "R3 and R5 in 4 bits: the published rptq-w4a4",
    "rptq-w4a4 128 ema-minmax none": "all four in 4 bits",
    "rptq-w4a4 128 ema-minmax R5": "**R5 alone in 8 bits**",
    "rptq-w4a4 128 mse -": "R3 and R5 in 4 bits, ranges by mse",
    "rptq-w4a4 128 mse R5": "**R5 alone in 8 bits**, ranges by mse",
}


def rptq_sites() -> str:
    """What activations in 4 bits cost at each site, of the engines that were measured."""
    measured, rows = engines(RPTQ), []
    dense = measured["none"]
    for name in filter(measured.__contains__, SITES):
        one = measured[name]
        share = 100 * one["exact"] / dense["exact"]
        same = [str(one["same_exact"]), str(one["same_rougeL"])]
        rows.append([SITES[name], small(one["kl_mean"]), f"{one['exact']:.1f}", f"{share:.0f}", *same])
    head = ["activations", "KL, nats", "exact answers, %", "… of the dense model's, %"]
    head += [f"the same answers, of {dense['of_exact']}", f"the same summaries, of {dense['of_rougeL']}"]
    return f"{markdown(head, rows)}\n\n{made_by(RPTQ)}"


SPOKEN = {
    "none": "none",
    "w8a16 round": "w8a16",
    "w4a16 128 round": "w4a16",
    "w4a16 128 awq": "w4a16 by AWQ",
    "w4a16 128 gptq": "w4a16 by GPTQ",
    "w8a8": "w8a8",
    "w8a8 dynamic smoothquant 0.5": "w8a8, SmoothQuant",
    "w8a8 static smoothquant search": "w8a8, static, SmoothQuant, α searched",
    "w4a8 128 round rotated": "w4a8",
    "w4a8 128 gptq rotated": "w4a8 by GPTQ",
    "rptq-w8a8 128 ema-minmax -": "rptq-w8a8",
    "rptq-w4a8 128 ema-minmax -": "rptq-w4a8",
    "rptq-w4a4 128 ema-minmax -": "rptq-w4a4",
    "rptq-w4a4 128 mse R5": "rptq-w4a4, R5 in 8 bits, ranges by mse",
    "none int8": "int8 cache",
    "none fp8": "fp8 cache",
    "w8a8 int8": "w8a8, int8 cache",
}


def spoken() -> str:
    """Summaries and answers beside the dense model's."""
    rows = []
    for name, label in SPOKEN.items():
        one = engines(RPTQ if name.startswith("rptq") else POCKET)[name]
        same = [NONE if name == "none" else str(one[f"same_{metric}"]) for metric in ("rougeL", "exact")]
        rows.append([label, f"{one['rougeL']:.1f}", same[0], f"{one['exact']:.1f}", same[1]])
    counts = [engines()["none"][f"of_{metric}"] for metric in ("rougeL", "exact")]
    head = ["", "ROUGE-L", f"the same summaries, of {counts[0]}", "exact answers, %"]
    table = markdown([*head, f"the same answers, of {counts[1]}"], rows)
    return f"{table}\n\n{made_by(POCKET)} {made_by(RPTQ)}"


def summaries() -> str:
    """ROUGE of the pocket model's summaries, and Hugging Face's, by dtype."""
    kinds = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    rows = []
    for dtype in ("fp32", "fp16", "bf16"):
        record = of(f"eval_pocket_{dtype}.json")
        ours, theirs = ([f"{side['metrics'][kind]:.2f}" for kind in kinds] for side in record["sides"])
        same = f"{record['agreement']['same_text']} of {record['agreement']['answers']}"
        rows.append([dtype, *ours, ", ".join(theirs), same])
    head = ["dtype", "ROUGE-1", "ROUGE-2", "ROUGE-L", "ROUGE-Lsum", "the same, Hugging Face", "equal answers"]
    return markdown(head, rows)


def divergence() -> str:
    """How far the pocket model's logits are from Hugging Face's."""
    files = {
        "eval_divergence_fp32.json": ("Ingot fp32", "Hugging Face fp32"),
        "eval_divergence_bf16.json": ("Ingot bf16", "Hugging Face fp32"),
        "eval_divergence_hf_bf16.json": ("Ingot fp32", "Hugging Face bf16"),
    }
    rows = []
    for file, names in files.items():
        divergence = of(file, "divergence")
        distances = [small(divergence[name]) for name in ("kl_mean", "kl_p99", "kl_max")]
        rows.append(
            [*names, *distances, f"{divergence['top1_agreement']:.2f} %", f"{divergence['top1_regret']:.3f}"]
        )
    head = ["engine", "reference", "KL mean", "KL p99", "KL max", "same likeliest token", "regret"]
    return markdown(head, rows)


def doctor() -> str:
    """What the doctor predicted and measured, and the mix on samples that chose nothing."""
    file = "doctor_pocket.json"
    found, uniform = of(file), of(file, "uniform")
    lines = {"w4a16": uniform["w4a16"], "**the mix**": found["chosen"]}
    lines |= {name: uniform[name] for name in ("w8a16", "none")}
    held = {"w4a16": engines()["w4a16 128 round"]["kl_mean"], "w8a16": engines()["w8a16 round"]["kl_mean"]}
    held |= {"**the mix**": of("doctor_pocket_held.json", "divergence.kl_mean"), "none": 0.0}
    rows = [
        [
            name,
            f"{one['bytes'] / 1e6:.2f} MB",
            small(one["kl_predicted"]),
            small(one["kl_measured"]),
            small(held[name]),
        ]
        for name, one in lines.items()
    ]
    budget = f"budget {next(iter(found['budget'].values()))}"
    return markdown([budget, "linear layers", "KL predicted", "KL measured", "on `held.jsonl`"], rows)


QUALITY_TABLES: dict[str, Callable[[], str]] = {
    "weights": weights,
    "caches": caches,
    "w8a8": w8a8,
    "w4a8": w4a8,
    "rptq": rptq,
    "rptq_sites": rptq_sites,
    "spoken": spoken,
    "summaries": summaries,
    "divergence": divergence,
    "doctor": doctor,
}
