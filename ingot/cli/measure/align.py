"""``ingot align``: the first place where an engine leaves the original."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.opening import expect_model
from ingot.cli.options.flags import (
    AsJson,
    Device,
    EnginePath,
    Threads,
    field_flags,
    given,
    option,
    set_threads,
)
from ingot.cli.options.prompt_sources import WRAPPED, ManyIds, PromptFile, PromptGiven, read_prompts
from ingot.cli.terminal.console import print_json, stdout
from ingot.cli.terminal.step_list import status_shown

if TYPE_CHECKING:
    from ingot.measure.align.align_session import Report

_WIDTH = 180
_SHOWN = 8  # tensors that differ
_REFERENCE = (
    "The original: a checkpoint folder, a Hugging Face id, a GGUF file, OpenAI's .pt file, another engine, "
    "or a trace written by `python -m ingot.measure.align.trace`."
)
_DTYPE = "The engine's compute dtype: fp16, bf16 or fp32."
_ORIGINAL = (
    "What runs the reference checkpoint: hf (the Hugging Face class), ingot (our unfused fp32 path) or auto "
    "(hf if it has a class)."
)


@dataclass(frozen=True)
class AlignFlags:
    """The engine, its original, the prompts, and what is shown."""

    engine: EnginePath
    reference: Annotated[str, option(_REFERENCE)]
    prompt: Annotated[list[str] | None, option("A prompt; may be repeated.", shown=False)] = None
    data: PromptFile = None
    chat: Annotated[bool, option(WRAPPED, "--chat")] = False
    ids: ManyIds = None
    steps: Annotated[int | None, option("Cached decode steps after each prompt.", shown="4", min=0)] = None
    every: Annotated[bool, option("Print every stage of every layer.", "--all")] = False
    html: Annotated[Path | None, option("Write the report as one HTML page.")] = None
    as_json: AsJson = False
    dtype: Annotated[str | None, option(_DTYPE, shown="its own; fp32 on a CPU")] = None
    original: Annotated[str | None, option(_ORIGINAL, shown="auto")] = None
    device: Device = None
    threads: Threads = None


@field_flags("flags")
def align(flags: AlignFlags) -> None:
    """Find the first stage at which an engine diverges from the original.

    Compares rendered prompt, token ids, embedding, every layer's norms, attention and MLP, final norm, logits
    and greedy ids, for prompts and cached decode steps, each against a noise floor measured on the spot
    (docs/align.md). Exit code 0: aligned, 1: diverged, 2: could not be compared.
    """
    if flags.html is not None and not flags.html.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {flags.html.parent}", param_hint="--html")
    prompts: list[PromptGiven] = []  # none: the library's own
    if flags.prompt or flags.ids or flags.data is not None:
        prompts = read_prompts(flags.prompt or [], flags.data, flags.ids or [], flag="--prompt")
    expect_model(flags.engine)
    from ingot.measure.align.align_session import align as run

    set_threads(flags.threads)
    inputs: list[Any] = [(one.as_message() if flags.chat else one).value for one in prompts]
    options = given(steps=flags.steps, device=flags.device, dtype=flags.dtype, original=flags.original)
    with status_shown("reading") as progress:
        report = run(flags.engine, flags.reference, inputs, **given(progress=progress), **options)
    if flags.html is not None:
        from ingot.measure.align.align_report import report_html

        flags.html.write_text(report_html(report), encoding="utf-8")
    if flags.as_json:
        from ingot.measure.align.align_report import report_json

        print_json(report_json(report))
    else:
        _show(report, every=flags.every)
    raise typer.Exit(0 if report.aligned else 1)


def _show(report: Report, *, every: bool) -> None:
    from ingot.measure.align.align_report import facts, verdict_text

    console = stdout()
    for name, value in facts(report):
        console.print(f"{name + ':':<13}{value}", markup=False)
    for i, case in enumerate(report.cases, start=1):
        console.print(f"prompt {i}:    {case.title} ({len(case.ids)} tokens)", markup=False)
    _show_texts(report)
    found = report.tensors
    if found is not None:
        console.print(found.text, style="red" if found.differences else None, markup=False)
        shown = found.differences if every else found.differences[:_SHOWN]
        for one in shown:
            console.print(f"  {one.name}: {one.text}", markup=False)
        if len(shown) < len(found.differences):
            console.print(
                f"  … {len(found.differences) - len(shown)} more (--all)", style="dim", markup=False
            )
    console.width = max(console.width, _WIDTH)  # columns are never cut
    console.print(_table(report, every=every))
    _show_first(report)
    style = "bold green" if report.aligned else "bold red"
    console.print(verdict_text(report), style=style, markup=False)


def _show_texts(report: Report) -> None:
    from ingot.measure.align.align_report import stops_text

    console = stdout()
    for i, case in enumerate(report.cases, start=1):
        for check in case.checks:
            console.print(
                f"prompt {i}, {check.stage}: {'differ' if check.is_bad else 'equal'} ({check.against})",
                style="red" if check.is_bad else None,
                markup=False,
            )
            if check.first is not None:
                at = slice(max(check.first - 4, 0), check.first + 8)
                console.print(f"  from {check.first} on: expected {check.expected[at]!r}", markup=False)
                console.print(f"  {'':>{len(str(check.first)) + 8}} got      {check.got[at]!r}", markup=False)
    console.print(stops_text(report.stops), style="red" if report.stops.is_bad else None, markup=False)


def _table(report: Report, *, every: bool) -> Any:
    """A line per stage: the step and prompt with the largest deviation, bad ones first."""
    from rich.table import Table

    from ingot.measure.align.align_report import all_lines, cells, short_lines

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("stage", "step", "max-abs", "relative L2", "alone", "floor", "limit", "cosine", ""):
        table.add_column(name, justify="left" if name in ("stage", "") else "right", no_wrap=True)
    for line in all_lines(report.rows) if every else short_lines(report.rows, report.first):
        row = line.row
        if row is None:
            table.add_row("…", *[""] * 7, line.note, style="dim")
            continue
        logits = "" if row.logits is None else f"top-1 {row.logits.top1:.1%}, KL {row.logits.kl:.1e}"
        marks = ["beyond" * row.is_bad, "wrong alone" * row.is_wrong_alone, line.note, logits]
        style = "red" if row.is_bad or row.is_wrong_alone else None
        table.add_row(row.stage, str(row.step), *cells(row), ", ".join(filter(None, marks)), style=style)
    return table


def _show_first(report: Report) -> None:
    from ingot.measure.align.align_report import why_text

    console, first = stdout(), report.first
    differ = [row for row in report.greedy if row.expected != row.got]
    for row in differ:
        kind = "beyond noise" if row.is_bad else "a near tie"
        ids = f"{row.expected}, the engine's {row.got} ({kind})"
        console.print(f"greedy id, prompt {row.case + 1}, step {row.step}: {ids}", markup=False)
    if not differ:
        console.print(f"greedy ids: equal ({len(report.greedy)})")
    if first is not None:
        step = f"cached step {first.row.step}" if first.row.step else "step 0, the prompt itself"
        where = f"{first.row.stage} (prompt {first.row.case + 1}, {step})"
        console.print(f"\nfirst bad stage: {where}", style="bold", markup=False)
        console.print(why_text(first), markup=False)
        for name, one in (("expected", first.expected), ("got", first.got)):
            moments = f"mean {one.mean:.4g}  std {one.std:.4g}  min {one.min:.4g}  max {one.max:.4g}"
            shape = "x".join(map(str, one.shape))
            console.print(f"  {name:<9}{shape} {one.dtype}  {moments}", markup=False)
        largest = first.row.alone if first.alone and first.row.alone else first.row.difference
        console.print(
            f"  largest difference at position {first.position}, channel {largest.channel}: "
            f"expected {first.expected_value:.6g}, got {first.got_value:.6g}"
        )
    for finding in report.findings:
        console.print(f"cause: {finding.text}", markup=False)
