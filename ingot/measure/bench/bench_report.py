"""The records of ``ingot bench`` in words and tables."""

from __future__ import annotations

from typing import Any

from ingot.config.build_config import NARROW_KV_DTYPES
from ingot.measure.side.text_table import Table, counted, number, numbers, percent, times

Record = dict[str, Any]


def headline(record: Record) -> list[str]:
    """The conditions of the figures: machine, versions, ceiling, start-up of each side, method."""
    found, ceiling = record["machine"], record["ceiling"]
    place = found.get("gpu") or found["cpu"] or "unknown CPU"
    driver = f", driver {found['driver']}" if found.get("driver") else ""
    commit = f" ({found['commit']})" if found["commit"] else ""
    versions = f"torch {found['torch']}, triton {found['triton'] or 'none'}, ingot {found['ingot']}{commit}"
    lines = [
        f"{place}{driver}, {versions}",
        f"ceiling: reads {number(ceiling['read_gb_s'])} GB/s, multiplies {ceiling['dtype']} at "
        f"{number(ceiling['matmul_tflop_s'])} TFLOP/s",
    ]
    for side in record["sides"]:
        facts = side["facts"]
        if "load_s" in facts:
            started = f"loaded in {number(facts['load_s'])} s, warmed up in {number(facts['warm_up_s'])} s"
            lines.append(f"{side['name']}: {facts['dtype']}, {started}")
        lines += [f"{side['name']}, {step}: {how}" for step, how in facts.get("kernels", {}).items()]
    load = record["wanted"].get("load", {})
    if load.get("left_out"):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in load["left_out"].items())
        lines.append(f"{load['name']}: {load['requests']:,} used, left out: {reasons}")
    lines.append(f"method: {record['method']}")
    if record.get("interrupted"):
        lines.append("interrupted: the figures are of what was finished")
    return lines


def tables(record: Record) -> list[Table]:
    """A table for each side, and one of the ratios where there are two."""
    table_of = {
        "latency": _latency,
        "throughput": _throughput,
        "kernels": _kernels,
        "transcribe": _transcribe,
        "caption": _caption,
    }[record["verb"]]
    found = [table_of(record, side) for side in record["sides"]]
    if record["ratios"]:
        first, second = (side["name"] for side in record["sides"])
        names = [name for name in record["ratios"][0] if name != "batch"]
        rows = [
            (str(entry.get("batch", "all")), *(times(entry[name]) for name in names))
            for entry in record["ratios"]
        ]
        columns = ("batch", *(name.replace("_per_s", "/s").replace("_", " ") for name in names))
        found.append(Table(f"speedup of {first} over {second}", columns, tuple(rows)))
    return found


def _who(side: Record) -> str:
    """A side's name and mode."""
    spec = side["spec"]
    modes = ["batch invariant"] if spec.get("batch_invariant") else []
    kv_dtype = spec.get("kv_dtype")
    modes += [f"{kv_dtype} KV cache"] if kv_dtype in NARROW_KV_DTYPES else []
    modes += ["embedding on the host"] if spec.get("embedding") == "host" else []
    return ", ".join([str(side["name"]), *modes])


def _latency(record: Record, side: Record) -> Table:
    wanted = record["wanted"]
    of_text = "prompt" in wanted
    rows = [
        (
            str(r["batch"]),
            *numbers(r, "ttft_ms.p50 ttft_ms.p90 decode_ms.p50 decode_ms.p90"),
            *numbers(r, "together_ms.p50 together_ms.p90"),
            *numbers(r, "streamed.ttft_ms.p50 streamed.tpot_ms.p50 streamed.tpot_ms.p90"),
            *numbers(r, "prompt_tokens_per_s output_tokens_per_s requests_per_s"),
            percent(r["mbu"]),
            percent(r["mfu_prefill"]),
            *([_mean(r["s_per_character"])] if of_text else ()),
        )
        for r in side["results"]
    ]
    title = (
        f"{_who(side)}: latency, {wanted['prompt_tokens']} prompt tokens, {wanted['new_tokens']} new, "
        f"{counted(wanted['repeats'], 'repeat')}"
    )
    columns = ("batch", "TTFT ms", "p90", "decode ms", "p90", "all decode", "p90", "TTFT seen", "TPOT seen")
    rates = ("p90", "prompt tok/s", "output tok/s", "req/s", "MBU", "prefill MFU")
    text = ("s/character, mean",) if of_text else ()
    return Table(title, (*columns, *rates, *text), tuple(rows))


def _transcribe(record: Record, side: Record) -> Table:
    wanted = record["wanted"]
    rows = [
        (str(r["batch"]), *numbers(r, "seconds.p50 rtfx clip_ms.p50 clip_ms.p90 tokens_per_s"))
        for r in side["results"]
    ]
    audio, rate = number(sum(wanted["seconds"])), wanted["tokens_per_second"]
    title = f"{_who(side)}: {wanted['clips']} clips, {audio} s of audio, {rate:g} tokens per second of audio"
    return Table(title, ("batch", "seconds", "RTFx", "clip ms", "p90", "tok/s"), tuple(rows))


def _caption(record: Record, side: Record) -> Table:
    wanted = record["wanted"]
    stages = list(side["results"][0]["stages_ms"])
    rows = [
        (
            str(r["batch"]),
            *numbers(r, "seconds.p50 pictures_per_s ttft_ms.p50 ttft_ms.p90 output_tokens_per_s"),
            *numbers(r, "encoder_ms.p50 encoder_pictures_per_s"),
            *(number(r["stages_ms"][name]["p50"]) for name in stages),
        )
        for r in side["results"]
    ]
    title = (
        f"{_who(side)}: {wanted['pictures']} pictures, {wanted['prompt_tokens']} prompt tokens, "
        f"{wanted['new_tokens']} new, {counted(wanted['repeats'], 'repeat')}; "
        "the encoder of a batch and its parts in ms"
    )
    columns = ("batch", "seconds", "pictures/s", "TTFT ms", "p90", "tok/s", "encoder", "pictures/s", *stages)
    return Table(title, columns, tuple(rows))


def _mean(seconds: Record | None) -> str:
    return "-" if seconds is None else f"{seconds['mean']:.3g}"


def _throughput(record: Record, side: Record) -> Table:
    load = record["wanted"]["load"]
    rows = [
        (
            load["name"],
            *numbers(r, "requests_per_s output_tokens_per_s prompt_tokens_per_s seconds.p50"),
            *numbers(r, "ttft_ms.p50 ttft_ms.p90 ttft_ms.p99 tpot_ms.p50 tpot_ms.p90 tpot_ms.p99"),
            percent(r["mfu"]),
        )
        for r in side["results"]
    ]
    title = (
        f"{_who(side)}: throughput, {load['requests']} requests, {load['prompt_tokens']:,} prompt tokens, "
        f"{load['new_tokens']:,} new, {counted(record['wanted']['repeats'], 'repeat')}"
    )
    rates = ("load", "req/s", "output tok/s", "prompt tok/s", "seconds")
    waits = ("TTFT ms", "p90", "p99", "TPOT ms", "p90", "p99", "MFU")
    return Table(title, (*rates, *waits), tuple(rows))


def _kernels(record: Record, side: Record) -> Table:
    rows = [
        (
            f"{r['op']} (cached)" if r["cached"] else r["op"],
            r["shape"],
            str(r["rows"]),
            *numbers(r, "us.p50 us.p90 gb_s"),
            number(r["tflop_s"]) if r["tflop_s"] else "-",
            "-" if r["cached"] else f"{percent(r['share_of_ceiling'])} {r['bound']}",
            *numbers(r, "torch_us.p50"),
            times(r["torch_ratio"]),
            r.get("note", ""),
        )
        for r in side["results"]
    ]
    figures = ("us", "p90", "GB/s", "TFLOP/s", "of ceiling", "PyTorch us", "ratio")
    return Table("kernels in a CUDA graph", ("kernel", "shape", "rows", *figures, "note"), tuple(rows))
