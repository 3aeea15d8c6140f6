"""``ingot align``: the first place where an engine leaves the original."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.console import print_json, stdout
from ingot.cli.flags import AsJson, Device, EnginePath, Threads, given, set_threads
from ingot.cli.prompts import PromptGiven, read_prompts
from ingot.cli.steps import status_shown

if TYPE_CHECKING:
    from ingot.align.session import Report
    from ingot.align.verdict import FirstBad, Row


_WIDTH = 180
_SHOWN = 8  # tensors that differ


def align(
    engine: EnginePath,
    reference: Annotated[
        str,
        typer.Option(
            help="The original: a checkpoint folder, a Hugging Face id, or a trace written by "
            "`python -m ingot.align.trace`."
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be repeated.", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Prompts from a file, one per line ('-': stdin). Lines of a .jsonl file are objects with "
            "prompt, messages or prompt_token_ids."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap each prompt as a user message in the chat format.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Prompts are token ids separated by spaces.")] = False,
    steps: Annotated[
        int | None, typer.Option(help="Cached decode steps after each prompt.", min=0, show_default="4")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print every stage of every layer.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page.")] = None,
    as_json: AsJson = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="The engine's compute dtype: fp16, bf16 or fp32.", show_default="its own; fp32 on a CPU"
        ),
    ] = None,
    original: Annotated[
        str | None,
        typer.Option(
            help="What runs the reference checkpoint: hf (the Hugging Face class), ingot (our "
            "unfused fp32 path) or auto (hf if it has a class).",
            show_default="auto",
        ),
    ] = None,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Find the first stage at which an engine diverges from the original.

    Compares rendered prompt, token ids, embedding, every layer's norms, attention and MLP, final norm, logits
    and greedy ids, for prompts and cached decode steps, each against a noise floor measured on the spot
    (docs/align.md). Exit code 0: aligned, 1: diverged, 2: could not be compared.
    """
    if html is not None and not html.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {html.parent}", param_hint="--html")
    prompts = read_prompts(prompt or [], data, chat=chat, ids=ids) if prompt or data else []
    options = given(steps=steps, device=device, dtype=dtype, original=original)
    report = _align(engine, reference, prompts, threads, options)
    if html is not None:
        from ingot.align.report import report_html

        html.write_text(report_html(report), encoding="utf-8")
    if as_json:
        from ingot.align.report import report_json

        print_json(report_json(report))
    else:
        _show(report, every=every)
    raise typer.Exit(0 if report.aligned else 1)


def _align(
    engine: str, reference: str, prompts: list[PromptGiven], threads: int | None, options: dict[str, Any]
) -> Report:
    """The comparison, with what is under way shown on a terminal."""
    from ingot.align.session import align as run_align

    set_threads(threads)
    inputs = [_input(one) for one in prompts]
    with status_shown("reading") as progress:
        return run_align(engine, reference, inputs, **given(progress=progress), **options)


def _input(one: PromptGiven) -> Any:
    if one.messages is not None:
        return one.messages
    return one.prompt if one.prompt is not None else one.prompt_token_ids


def _show(report: Report, *, every: bool) -> None:
    from ingot.align.report import facts, verdict_text

    console = stdout()
    for name, value in facts(report):
        console.print(f"{name + ':':<13}{value}", markup=False)
    for i, case in enumerate(report.cases, start=1):
        console.print(f"prompt {i}:    {case.title} ({len(case.ids)} tokens)", markup=False)
    _show_texts(report)
    _show_tensor_check(report, every)
    console.width = max(console.width, _WIDTH)  # columns are never cut
    console.print(_table(report, every=every))
    _show_first(report)
    style = "bold green" if report.aligned else "bold red"
    console.print(verdict_text(report), style=style, markup=False)


def _show_texts(report: Report) -> None:
    from ingot.align.report import stops_text

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


def _show_tensor_check(report: Report, every: bool) -> None:
    """Which tensors are not the reference's, and how."""
    found = report.tensors
    if found is None:
        return
    stdout().print(found.text, style="red" if found.differences else None, markup=False)
    shown = found.differences if every else found.differences[:_SHOWN]
    for one in shown:
        stdout().print(f"  {one.name}: {one.text}", markup=False)
    if len(shown) < len(found.differences):
        stdout().print(f"  … {len(found.differences) - len(shown)} more (--all)", style="dim", markup=False)


def _table(report: Report, *, every: bool) -> Any:
    """A line a stage: the step and prompt that is furthest out, bad ones first of all."""
    from rich.table import Table

    from ingot.align.report import all_lines, cells, short_lines

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("stage", "step", "max-abs", "relative L2", "alone", "floor", "limit", "cosine", ""):
        table.add_column(name, justify="left" if name in ("stage", "") else "right", no_wrap=True)
    for line in all_lines(report.rows) if every else short_lines(report.rows, report.first):
        row = line.row
        if row is None:
            table.add_row("…", *[""] * 7, line.note, style="dim")
            continue
        marks = ["beyond" * row.is_bad, "wrong alone" * row.is_wrong_alone, line.note, _logits_text(row)]
        style = "red" if row.is_bad or row.is_wrong_alone else None
        table.add_row(row.stage, str(row.step), *cells(row), ", ".join(filter(None, marks)), style=style)
    return table


def _logits_text(row: Row) -> str:
    return "" if row.logits is None else f"top-1 {row.logits.top1:.1%}, KL {row.logits.kl:.1e}"


def _show_first(report: Report) -> None:
    """Greedy ids, the first bad stage, and what explains it."""
    console, first = stdout(), report.first
    differ = [row for row in report.greedy if row.expected != row.got]
    for row in differ:
        kind = "beyond noise" if row.is_bad else "a near tie"
        ids = f"{row.expected}, the engine's {row.got} ({kind})"
        console.print(f"greedy id, prompt {row.case + 1}, step {row.step}: {ids}", markup=False)
    if not differ:
        console.print(f"greedy ids: equal ({len(report.greedy)})")
    if first is not None:
        _show_tensors(first)
    for finding in report.findings:
        console.print(f"cause: {finding.text}", markup=False)


def _show_tensors(first: FirstBad) -> None:
    """Where the tensors leave first, and what they look like there."""
    from ingot.align.report import why_text

    console = stdout()
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
