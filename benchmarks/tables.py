"""The tables of README and docs that were measured on a GPU or tell a CPU's speed, as Markdown.

print(GPU_TABLES["headline"]())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from benchmarks.result_values import RESULTS, significant
from benchmarks.result_values import value_at as of

Row = dict[str, Any]
NONE = "–"
BATCHES = ("1", "8", "32", "64")
LABELS = {
    "none": "fp16",
    "w8a16": "w8a16",
    "w4a16": "w4a16, groups of 128, asymmetric",
    "w8a8": "w8a8, dynamic",
    "w4a8": "w4a8",
    "rptq-w8a8": "rptq-w8a8",
}
REFERENCE = "reference"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first row of ``head`` are the columns' names."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def at(row: Row | None, *path: str, digits: int = 3) -> str:
    """A value with so many digits, or a dash where it was not measured."""
    found: Any = row
    for key in path:
        found = None if found is None else found.get(key)
    return NONE if found is None else significant(found, digits)


def made_by(file: str) -> str:
    """Where a table is from: file, GPU or CPU, commit, torch."""
    record = of(file)
    found = record.get("machine", record)
    place = found.get("gpu") or found["cpu"]
    return f"`results/{file}`: {place}, commit {found['commit']}, torch {found['torch']}"


def headline() -> str:
    """docs/benchmarks.md: decode steps and mixed load of every scheme beside vLLM and Hugging Face."""
    table, vllm, hf = of("headline.json"), of(f"{REFERENCE}/vllm.json"), of(f"{REFERENCE}/huggingface.json")
    schemes = table["schemes"]
    rows = [
        [
            f"**Ingot**, {label}",
            *(f"**{at(schemes[name], 'decode', b, 'p50')}**" for b in BATCHES),
            _load(name),
        ]
        for name, label in LABELS.items()
    ]
    for form, entry in vllm["formats"].items():
        better = best(entry["runs"])
        steps = [at(better, "decode_ms", b) for b in BATCHES]
        load = significant(better["mixed_output_tokens_per_s"], 4)
        rows.append([f"vLLM {vllm['versions']['vllm']}, {form}", *steps, load])
    version = hf["eager"]["facts"]["transformers"].rpartition(".")[0]
    steps = [significant(entry["decode_ms"]["p50"]) for entry in hf["eager"]["latency"]]
    rows.append([f"Hugging Face {version}, eager", *steps, NONE])
    steps = [at(hf["static_compile"], "decode_ms", b) for b in BATCHES]
    rows.append([f"Hugging Face {version}, static cache, compiled", *steps, NONE])
    steps = [at(schemes["none"], "decode", b, "floor") for b in BATCHES]
    rows.append(["what the memory's bandwidth allows, fp16", *steps, NONE])
    head = ["ms per decode step", *(f"batch {b}" for b in BATCHES), "256 mixed requests, output tokens/s"]
    return f"{markdown(head, rows)}\n\n{_run(table)}"


def best(runs: Sequence[Row]) -> Row:
    """The better of a reference's runs, figure by figure."""
    return {
        "decode_ms": {b: min(run["decode_ms"][b] for run in runs) for b in BATCHES},
        "prefill_2048_ms": min(run["prefill_2048_ms"] for run in runs),
        "mixed_output_tokens_per_s": max(run["mixed_output_tokens_per_s"] for run in runs),
    }


def _load(name: str) -> str:
    """The mixed load of a scheme; of w8a8 with both caches."""
    schemes = of("headline.json", "schemes")
    text = at(schemes[name], "mixed", "p50", digits=4)
    if name == "w8a8":
        text += f"; int8 KV cache **{at(schemes['w8a8_int8'], 'mixed', 'p50', digits=4)}**"
        return f"**{text.replace(';', '**;', 1)}"
    return text if text == NONE else f"**{text}**"


def _run(table: Row) -> str:
    """GPU, bandwidth, commit and versions of the headline run, in a sentence."""
    found, read = table["machine"], table["read_gb_s"]
    commits = table["commits"]
    commit = f"commit {commits[0]}" if len(commits) == 1 else f"commits {', '.join(commits)}"
    reads = f"{read['least']:,.0f} to {read['most']:,.0f} GB/s"
    return (
        f"Ingot's rows: one {found['gpu']} that reads {reads}, {commit}, torch {found['torch']}, "
        f"Triton {found['triton']}; `docs/results/headline.json`."
    )


def headline_decode() -> str:
    """Decode steps: median, p90, and from least to most over all runs."""
    table = of("headline.json")

    def cell(entry: Row) -> str:
        ends = f"{significant(entry['least'])} to {significant(entry['most'])}"
        return f"**{significant(entry['p50'])}** ({significant(entry['p90'])}; {ends})"

    rows = []
    for name, label in LABELS.items():
        entry = table["schemes"][name]
        runs = entry["decode"]["1"]["runs"]
        steps = [cell(entry["decode"][b]) for b in BATCHES]
        rows.append([label, *steps, f"{runs} in {entry['rounds']}"])
    shares = [f"{100 * table['schemes']['none']['decode'][b]['mbu']:.0f} %" for b in BATCHES]
    rows.append(["MBU of fp16", *shares, ""])
    head = ["ms: median (p90; least to most)", *(f"batch {b}" for b in BATCHES), "runs in processes"]
    return f"{markdown(head, rows)}\n\n{_run(table)}"


def headline_prompts() -> str:
    """Time to the first token, a long prompt, and the mixed load."""
    schemes = of("headline.json", "schemes")
    hf, vllm = of(f"{REFERENCE}/huggingface.json"), of(f"{REFERENCE}/vllm.json", "formats")
    rows = []
    for name, label in {**LABELS, "w8a8_int8": "w8a8, int8 KV cache"}.items():
        entry = schemes[name]
        firsts = [at(entry, "ttft", b, "p50") for b in BATCHES]
        prefill, p90, *ends = (at(entry, "prefill", name) for name in ("p50", "p90", "least", "most"))
        if "prefill" in entry:
            prefill += f" ({p90}; {' to '.join(ends)})"
        load = at(entry, "mixed", "p50", digits=4)
        if "mixed" in entry:
            load += f" ({at(entry, 'mixed', 'least', digits=4)} to {at(entry, 'mixed', 'most', digits=4)})"
        rows.append([label, *firsts, prefill, load])
    for form, entry in vllm.items():
        better = best(entry["runs"])
        firsts = [at(entry["runs"][0], "ttft_ms", b) for b in BATCHES]
        load = significant(better["mixed_output_tokens_per_s"], 4)
        rows.append([f"vLLM, {form}", *firsts, significant(better["prefill_2048_ms"]), load])
    firsts = [significant(entry["ttft_ms"]["p50"]) for entry in hf["eager"]["latency"]]
    rows.append(["Hugging Face, eager", *firsts, NONE, NONE])
    head = ["", *(f"TTFT, batch {b}, ms" for b in BATCHES), "prompt of 2048, ms (p90; least to most)"]
    return markdown([*head, "mixed load, output tokens/s (least to most)"], rows)


def products() -> str:
    """Gate and up alone, by rows: µs and share of the ceiling."""
    file = "quantized_products.json"
    sides = {
        "fp16 library": ("fp16", "F.linear"),
        "w8a16": ("w8a16", ""),
        "w4a16": ("w4a16", ""),
        "w8a8": ("w8a8", "int8"),
        "`torch._int_mm`": ("w8a8", "torch._int_mm"),
        "PyTorch's int4": ("w4a16", "torch._weight_int4pack_mm"),
        "PyTorch's int8": ("w8a16", "torch._weight_int8pack_mm"),
    }
    found = [row for row in of(file, "rows") if row["shape"] == "gate_up"]

    def cell(count: int, side: str, kernel: str) -> str:
        ours = [r for r in found if r["rows"] == count and r["side"] == side]
        named = [r for r in ours if r["kernel"].startswith(kernel)]
        named = named if kernel else [r for r in ours if not r["kernel"].startswith("torch.")]
        return f"{significant(named[0]['us'])} ({named[0]['percent']:.0f} %)"

    counts = (1, 16, 64, 256, 2048)
    rows = [[str(count), *(cell(count, *side) for side in sides.values())] for count in counts]
    return f"{markdown(['rows', *sides], rows)}\n\n{made_by(file)}"


def kernels() -> str:
    """Every kernel of a decode step of fp16, by rows."""
    file = "kernels_7b.json"
    found = [row for row in of(file, "sides.0.results") if not row["cached"] and row["rows"] <= 64]
    names = {(row["op"].split(" norm")[0].split(" rope")[0].split(" silu")[0], row["shape"]) for row in found}
    order = ("small_qkv", "paged_attention", "small_linear", "small_gate_up", "decoder layer")
    rows = []
    for op, shape in sorted(names, key=lambda one: (_place(one[0], order), one)):
        if _place(op, order) == len(order):
            continue
        cells = []
        for batch in BATCHES:
            own = [
                r for r in found if r["rows"] == int(batch) and r["shape"] == shape and r["op"].startswith(op)
            ]
            one = own[0] if own else None
            cells.append(NONE if one is None else f"{significant(one['us']['p50'])} ({_percent(one)})")
        rows.append([f"{op}, {shape}", *cells])
    head = ["µs (share of the ceiling)", *(f"rows: {b}" for b in BATCHES)]
    read = of(file, "ceiling.read_gb_s")
    return f"{markdown(head, rows)}\n\n{made_by(file)}; the ceiling is {read:,.0f} GB/s."


def _place(op: str, order: Sequence[str]) -> int:
    return next((i for i, name in enumerate(order) if op.startswith(name)), len(order))


def _percent(row: Row) -> str:
    return f"{100 * row['share_of_ceiling']:.0f} %"


def attention() -> str:
    """Decode attention beside PyTorch's on contiguous keys: our time over theirs."""
    file = "paged_attention.json"
    even = [row for row in of(file, "rows") if not row["ragged"] and row["head_dim"] == 128]
    found = [row for row in even if "pytorch_contiguous" in row]
    rows = []
    for heads in sorted({(row["heads"], row["kv_heads"]) for row in found}):
        own = [row for row in found if (row["heads"], row["kv_heads"]) == heads]
        cells = [
            f"{r['batch']} x {r['context']}: {r['ours']['us'] / r['pytorch_contiguous']['us']:.2f}"
            for r in own
        ]
        rows.append([f"{heads[0]} / {heads[1]}", ", ".join(cells)])
    head = ["query / KV heads", "requests x tokens: Ingot's time over PyTorch's"]
    return f"{markdown(head, rows)}\n\n{made_by(file)}"


def sampling() -> str:
    """Draws from a vocabulary of 151936."""
    file = "sampling.json"
    found = of(file, "cases")
    names = list(dict.fromkeys(case["case"] for case in found))
    counts = sorted({case["rows"] for case in found})

    def cell(name: str, count: int) -> str:
        one = next(case for case in found if case["case"] == name and case["rows"] == count)
        return f"{significant(one['kernels']['us'])} ({significant(one['twin']['us'])})"

    rows = [[name, *(cell(name, count) for count in counts)] for name in names]
    head = ["µs (PyTorch)", *(f"{count} row{'s' * (count > 1)}" for count in counts)]
    return f"{markdown(head, rows)}\n\n{made_by(file)}"


def builds() -> str:
    """What builds of a 7B cost, by scheme and method."""
    files = [f"build_schemes_7b{part}.json" for part in ("", "_gptq", "_awq", "_rptq")]
    rows = []
    for file in files:
        for row in (one for one in of(file, "schemes") if "error" not in one):
            memory = f"{row['peak_host_gb']:.1f} ({row['peak_host_anonymous_gb']:.1f})"
            name = row["scheme"] + (" *" if file != files[0] else "")
            size = f"{row['engine_bytes'] / 1e9:.1f}"
            rows.append([name, significant(row["seconds"]), f"{row['peak_gpu_gb']:.1f}", memory, size])
    head = ["", "s", "most GPU memory, GB", "most host memory, GB (of no file)", "engine, GB"]
    return f"{markdown(head, rows)}\n\n{made_by(files[0])}; \\* three at once on one GPU, a file each."


def invariance() -> str:
    """What the batch-invariant mode costs, and what changes without it."""
    file = "batch_invariant.json"
    usual, held = of(file, "default"), of(file, "batch_invariant")
    names = {f"decode_ms_batch_{b}": f"decode step, batch {b}, ms" for b in (1, 8, 32)}
    names["prefill_2048_ms"] = "prefill of 2048 tokens, back to back, ms"
    rows = []
    for name, label in names.items():
        a, b = usual[name], held[name]
        cells = [f"{significant(one['median'])} ({significant(one['p90'])})" for one in (a, b)]
        rows.append([label, *cells, f"{100 * (b['median'] / a['median'] - 1):+.0f} %"])
    counts = [one["alone_and_among_8"] for one in (usual, held)]
    label = (
        f"of {counts[0]['texts']} greedy texts of {counts[0]['new_tokens']} tokens, differ alone and among 8"
    )
    rows.append([label, *(str(one["differ"]) for one in counts), ""])
    head = ["median (p90)", "default", "batch invariant", ""]
    return f"{markdown(head, rows)}\n\n{made_by(file)}"


def memory() -> str:
    """The ledger's prediction and what a GPU held, of two settings."""
    file = "memory.json"
    settings = [one["kinds"] for one in of(file, "settings")]
    names = {
        **{name: name for name in ("weights", "KV cache", "activations")},
        "warm_up": "graphs, buffers, sampling, workspaces",
        "process": "process",
        "total": "**what the GPU holds in the end**",
    }
    rows = []
    for name, label in names.items():
        sides = [one[name][side] / 1e9 for one in settings for side in ("predicted", "measured")]
        rows.append([label, *(f"{value:.3f}" for value in sides)])
    wanted = ("batch 64 of 4096 tokens", "batch 8 of 2048")
    head = ["GB", *(f"{one}: {side}" for one in wanted for side in ("predicted", "measured"))]
    return f"{markdown(head, rows)}\n\n{made_by(file)}"


def small_cards() -> str:
    """What one request of 1,024 tokens takes by the ledger, and the longest request that fits each card."""
    file = "small_cards.json"
    record = of(file)
    kinds = ("weights", "KV cache", "activations", "reserve", "process")
    rows = []
    for one in record["rows"]:
        tables = sum(one["items"][f"weights: {name}"] for name in ("embedding", "head"))
        weights = f"{one['kinds']['weights'] / 1e9:.2f} ({tables / 1e9:.2f})"
        parts = [weights, *(f"{one['kinds'][kind] / 1e9:.2f}" for kind in kinds[1:])]
        rows.append(
            [
                f"{one['shape']}, {one['setting']}",
                f"**{one['needed'] / 1e9:.2f}**",
                *parts,
                *(_card(card) for card in one["cards"]),
            ]
        )
    cards = [f"{card['gib']} GiB" for card in record["rows"][0]["cards"]]
    head = ["GB", "needs", "weights (embedding and head)", *kinds[1:], *cards]
    commit = record["machine"]["commit"]
    return f"{markdown(head, rows)}\n\n`results/{file}`: computed by the ledger, commit {commit}"


def _card(card: Row) -> str:
    return f"{card['longest']:,}" if card["fits"] else f"lacks {card['missing'] / 1e9:.2f}"


def pocket_cpu() -> str:
    """The pocket model on one CPU thread, by scheme, beside dense weights."""
    names = {
        "none": "none (dense)",
        **{n: n for n in ("w8a16", "w4a16", "w8a8", "w4a8")},
        "rptq": "rptq-w8a8",
    }
    rows = []
    dense: list[float] = []
    for name, label in names.items():
        results = of(f"pocket_cpu_{name}.json", "sides.0.results")
        times = [one[figure]["p50"] for figure in ("decode_ms", "ttft_ms") for one in results]
        dense = dense or times
        ratios = [
            f" ({own / base:.1f})" if name != "none" else "" for own, base in zip(times, dense, strict=True)
        ]
        rows.append([label, *(significant(t) + r for t, r in zip(times, ratios, strict=True))])
    head = [
        "ms (times dense)",
        "decode step, 1 request",
        "8 requests",
        "prompts of 128, 1 request",
        "8 requests",
    ]
    return f"{markdown(head, rows)}\n\n{made_by('pocket_cpu_none.json')}, one thread; a file each."


def faults(file: str) -> str:
    """What ``verify`` says of faults by schemes: the largest deviation, in parts of its limit."""
    rows = of(file)["rows"]
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    cells = {(row["fault"], row["scheme"]): f"{row['verdict']}, {row['most']:.2g}" for row in rows}
    named = list(dict.fromkeys(row["fault"] for row in rows))
    table = markdown(
        ["fault", *schemes],
        [[fault or "none", *(cells.get((fault, scheme), NONE) for scheme in schemes)] for fault in named],
    )
    seconds = [row["seconds"] for row in rows if row["fault"] is None]
    took = f"a sound engine took {min(seconds):.1f} to {max(seconds):.1f} s"
    return f"{table}\n\n{made_by(file)}; {took}."


def false_alarms() -> str:
    """How many sound engines of random weights failed, on a CPU and on a GPU."""
    lines = []
    for file in ("false_alarms_cpu.json", "false_alarms_gpu.json"):
        found = of(file)
        most = significant(max(found["worst"].values()), 2)
        failed = f"{found['false_alarms']} of {found['builds']} sound engines failed"
        lines.append(f"- {failed}; the largest deviation was {most} of its limit. {made_by(file)}.")
    return "\n".join(lines)


def align_faults(file: str, where: str) -> str:
    """What ``align`` says of small faults by schemes and dtypes; nothing where it was not measured."""
    if not (RESULTS / file).is_file():
        return ""
    rows = of(file)["rows"]
    engines = dict.fromkeys((row["scheme"], row["dtype"]) for row in rows)
    faults = dict.fromkeys(row["fault"] for row in rows)
    cells = {
        (row["fault"], row["scheme"], row["dtype"]): f"{row['verdict']}, {row['most']:.2g}" for row in rows
    }
    table = markdown(
        ["engine", *(fault or "none" for fault in faults)],
        [[" ".join(engine), *(cells.get((fault, *engine), NONE) for fault in faults)] for engine in engines],
    )
    return f"{where}:\n\n{table}\n\n{made_by(file)}."


def align_false_alarms() -> str:
    """How many sound engines of random weights were not aligned, on a CPU and on a GPU."""
    lines = []
    for file in ("align_false_alarms_cpu.json", "align_false_alarms_gpu.json"):
        if (RESULTS / file).is_file():
            found = of(file)
            failed = f"{found['false_alarms']} of {found['builds']} sound engines diverged"
            most = significant(found["most"], 2)
            lines.append(f"- {failed}; the largest deviation was {most} of its limit. {made_by(file)}.")
    return "\n".join(lines)


GPU_TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "headline-decode": headline_decode,
    "headline-prompts": headline_prompts,
    "products": products,
    "kernels": kernels,
    "attention": attention,
    "sampling": sampling,
    "builds": builds,
    "invariance": invariance,
    "memory": memory,
    "small-cards": small_cards,
    "pocket-cpu": pocket_cpu,
    "faults-gpu": partial(faults, "faults_gpu.json"),
    "faults-cpu": partial(faults, "faults_cpu.json"),
    "false-alarms": false_alarms,
    "align-faults-cpu": partial(align_faults, "align_faults_cpu.json", "In fp32 on a CPU"),
    "align-faults-gpu": partial(align_faults, "align_faults_gpu.json", "In the engine's 16 bits on a GPU"),
    "align-false-alarms": align_false_alarms,
}
