"""``ingot sweep``: precision by batch in one table and one picture.

Owns the verb's flags, what a quality is measured with, and which files stand in the folder at the end. Knows
no measurement and no metric.

    ingot sweep models/pocket-chat --dtype fp32,bf16 --batch 1,2,4,8 --out sweeps/pocket
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.console import command_line, print_json, print_table, stderr, stdout
from ingot.cli.flags import AsJson, Device, Threads, given
from ingot.cli.signals import ends_once
from ingot.cli.steps import status_shown
from ingot.config.schemes import WITHOUT_SAMPLES
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.bench.sweep import Record, Sweep
    from ingot.bench.sweep_line import Quality

REPEATS = 3
_FAILED = 1
_FILES = ("sweep.json", "sweep.html", "sweep.png")


def sweep(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            help="A checkpoint folder or a Hugging Face id.", metavar="CHECKPOINT", show_default=False
        ),
    ] = None,
    random_weights: Annotated[
        str | None,
        typer.Option(help="A config.json (or its folder), run with random weights instead of a checkpoint."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for points.jsonl, sweep.json, sweep.html, sweep.png.", show_default=False),
    ] = None,
    quant: Annotated[
        str, typer.Option(help=f"none, {', '.join(WITHOUT_SAMPLES)} or FILE.yaml, separated by commas.")
    ] = "none",
    kv_dtype: Annotated[
        str, typer.Option(help="Dtypes of the KV cache: model, int8, fp8, separated by commas.")
    ] = "model",
    dtype: Annotated[
        str,
        typer.Option(help="fp16, bf16, fp32, separated by commas; auto: the model's own, fp32 on a CPU."),
    ] = "auto",
    batch: Annotated[
        str, typer.Option(help="Batch sizes, separated by commas; auto doubles until one does not fit.")
    ] = "auto",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs per point.")] = REPEATS,
    data: Annotated[
        Path | None, typer.Option(help="Text on which perplexity measures each precision's quality.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use the first N items of --data.", min=1)] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="hf (the Hugging Face class in the first dtype, as a line of its own) or hf:CHECKPOINT.",
            metavar="hf",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the points already in --out.")] = False,
    draw: Annotated[
        bool,
        typer.Option("--draw", help="Measure nothing; draw the table and picture of the points in --out."),
    ] = False,
    no_png: Annotated[bool, typer.Option("--no-png", help="Write only HTML, without matplotlib.")] = False,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed, memory and quality by precision and batch size, until one no longer fits.

    Points are saved as they are measured: the same command resumes where the last one ended. Exit
    code 0: measured, including sizes that do not fit; 1: a process died; 2: usage error.
    """
    if out is None:
        raise typer.BadParameter("give the folder for the results", param_hint="--out")
    if not no_png:
        from ingot.bench.picture import check_matplotlib

        check_matplotlib()
    if draw:
        _finish(out, no_png, as_json)
        return
    if (checkpoint is None) == (random_weights is None):
        raise typer.BadParameter("give either CHECKPOINT or --random-weights CONFIG")
    from ingot.bench.latency import Latency
    from ingot.bench.side import SideSpec
    from ingot.bench.sweep import Sweep

    quality, told = _quality(data, limit, random_weights)
    wanted = Sweep(
        SideSpec(path=checkpoint, random_weights=random_weights, **given(device=device)),
        dtypes=_words(dtype, "--dtype"),
        quants=_words(quant, "--quant"),
        kv_dtypes=_words(kv_dtype, "--kv-dtype"),
        batches=_batches(batch),
        shape=Latency((1,), prompt_tokens, new_tokens, repeats),
        against=against,
        quality_of=told,
        threads=threads,
    )
    done = False
    try:
        with ends_once(), status_shown("starting") as say:
            _run(wanted, out, quality, fresh, say)
        done = True
    finally:
        if not done:  # interrupted, or one side cannot be loaded
            _write_what_there_is(out, no_png)
    if _finish(out, no_png, as_json):
        raise typer.Exit(_FAILED)


def _run(
    wanted: Sweep, out: Path, quality: Quality | None, fresh: bool, say: Callable[[str], None] | None
) -> None:
    from ingot.bench.sweep import run_sweep

    run_sweep(wanted, out, quality=quality, fresh=fresh, command=command_line(), say=say)


def _words(text: str, flag: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ConfigError("expected names separated by commas", seen=repr(text), flag=flag)
    return words


def _batches(text: str) -> tuple[int, ...]:
    """The sizes in growing order; none for ``auto``."""
    from ingot.bench.load import parse_batches

    return () if text.strip() == "auto" else tuple(sorted(set(parse_batches(text))))


def _quality(
    data: Path | None, limit: int | None, random_weights: str | None
) -> tuple[Quality | None, dict[str, Any] | None]:
    """What measures the quality, and what the record says of it."""
    if data is None:
        if limit is not None:
            raise typer.BadParameter("--limit needs --data")
        return None, None
    if random_weights is not None:
        raise typer.BadParameter("random weights have no quality: --data needs a CHECKPOINT")
    from ingot.cli.sweep_quality import text_quality

    quality = text_quality(data, limit)
    return quality, quality.to_json()


def _finish(out: Path, no_png: bool, as_json: bool) -> bool:
    """Write the results of a folder's points, and show them; whether something is missing in them."""
    from ingot.bench.sweep_report import broken

    record = _write(out, no_png)
    if as_json:
        print_json(record)
    else:
        _show(record, out)
    return broken(record)


def _show(record: Record, out: Path) -> None:
    from ingot.bench.sweep_report import limits, sweep_lines, sweep_table, sweep_title

    for line in (sweep_title(record), *sweep_lines(record)):
        stdout().print(line, markup=False)
    stdout().print()
    print_table(sweep_table(record))
    for line in limits(record):
        stdout().print(line, markup=False)
    for line in record["lines"]:
        for point in line["points"]:
            for doubt in point["doubts"]:
                stderr().print(f"warning: {line['name']}, {doubt}", markup=False)
    stderr().print(f"written: {', '.join(str(out / name) for name in _FILES if (out / name).exists())}")


def _write_what_there_is(out: Path, no_png: bool) -> None:
    """The results so far, if there are any."""
    from ingot.bench.sweep_store import POINTS, read_points

    if read_points(out / POINTS):
        _write(out, no_png)


def _write(out: Path, no_png: bool) -> Record:
    from ingot.bench.picture_html import Page, write_html
    from ingot.bench.sweep import record_of
    from ingot.bench.sweep_report import limits, panels, sweep_lines, sweep_table, sweep_title
    from ingot.bench.sweep_store import POINTS, read_points

    record = record_of(read_points(out / POINTS))
    (out / "sweep.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    title, lines, drawn = sweep_title(record), sweep_lines(record), panels(record)
    page = Page(title, lines, sweep_table(record), limits(record), record["commands"])
    write_html(drawn, page, out / "sweep.html")
    if drawn and not no_png:
        from ingot.bench.picture import write_png

        write_png(drawn, title, lines, out / "sweep.png")
    return record
