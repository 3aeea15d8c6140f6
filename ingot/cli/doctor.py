"""``ingot doctor``: which layers need their bits, and a file of schemes that keeps a budget.

Owns the verb's flags, where tables, JSON and the file go, and the exit code. Knows no measurement.

    ingot doctor models/pocket-chat --data recipes/heldout.jsonl --quant SCHEME --budget kl=0.0005
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.console import command_line, finite, print_json, print_table, stderr, stdout
from ingot.cli.flags import (
    RARELY,
    AsJson,
    Device,
    JsonFile,
    SkipBad,
    Threads,
    Where,
    field_pairs,
    given,
    set_threads,
)
from ingot.cli.signals import ends_once
from ingot.cli.steps import bar_shown
from ingot.config.quant_file import quant_text, read_quant
from ingot.config.schemes import LADDERED, MILDEST, WEIGHT_ONLY, choosing, listed
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.evaluate.doctor import Diagnosis

LIMIT = 64
_NONE_HOLDS = 1
_TIMED = listed(name for name in LADDERED if name not in WEIGHT_ONLY)
_EITHER = listed(name for name in LADDERED if name in WEIGHT_ONLY)
_GROUPED = listed(choosing("symmetric"))
_METRIC = "kl"


def doctor(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A checkpoint folder or a Hugging Face id.", metavar="CHECKPOINT", show_default=False
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Texts similar to what it will run: .jsonl (one record per line), .json (a list), "
            ".txt (one text).",
            show_default=False,
        ),
    ],
    quant: Annotated[
        str, typer.Option(help=f"The scheme to start from: {listed(LADDERED, 'or')}.", show_default=False)
    ],
    budget: Annotated[
        str,
        typer.Option(
            help="Limit on the mean KL divergence of the next token, in nats.",
            metavar="kl=X",
            show_default=False,
        ),
    ],
    least: Annotated[
        str | None,
        typer.Option(
            help=f"What the mix minimizes: bytes or time. {_EITHER} take either, {_TIMED} only time.",
            metavar="bytes|time",
            show_default=f"bytes; {_TIMED}: time",
        ),
    ] = None,
    up_to: Annotated[
        str | None,
        typer.Option(
            help=f"The highest precision that a layer may get: {MILDEST}, or none: the engine's dtype.",
            show_default="none",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help=f"Columns per scale in {_GROUPED}: 32, 64, 128, or 0: one scale per row.",
            show_default="128",
            rich_help_panel=RARELY,
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help=f"Whether {_GROUPED} goes without zero points.",
            show_default="asymmetric",
            rich_help_panel=RARELY,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="The file to write, for `ingot build --quant`."),
    ] = Path("doctor.yaml"),
    as_json: AsJson = False,
    json_file: JsonFile = None,
    every: Annotated[bool, typer.Option("--all", help="Show every layer, not only the first 20.")] = False,
    limit: Annotated[int, typer.Option(help="Use the first N items of --data.", min=1)] = LIMIT,
    where: Where = None,
    skip_bad: SkipBad = False,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window.",
            show_default="the context, at most 1024",
            min=2,
            rich_help_panel=RARELY,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Use the first N tokens of each text.",
            min=2,
            show_default="2048",
            rich_help_panel=RARELY,
        ),
    ] = None,
    device: Device = None,
    threads: Threads = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Measure what quantization costs layer by layer; write the mix of schemes that meets a budget.

    Exit code 0: the file holds a mix that was measured within the budget; 1: there is none, nothing is
    written; 2: usage error.
    """
    allowed = _budget(budget)
    _check_target(out, "--out", (".yaml", ".yml"))
    if out.exists() and not force:
        raise ConfigError("the file exists", seen=out, flag="--force replaces it; --out chooses another file")
    chosen = read_quant(quant, group=group_size, symmetric=symmetric)
    set_threads(threads)
    from ingot.evaluate.data import read_data
    from ingot.evaluate.doctor import Wanted, check_wanted
    from ingot.evaluate.doctor import doctor as run
    from ingot.evaluate.doctor.session import MAX_TOKENS
    from ingot.evaluate.perplexity import Reading

    reading = Reading(window, None, max_tokens or MAX_TOKENS)
    options = given(least=least, up_to=up_to, device=device)
    wanted = Wanted(checkpoint, chosen, allowed, reading=reading, **options)
    check_wanted(wanted)
    items = read_data(data, limit=limit, skip_bad=skip_bad, where=field_pairs(where))
    with ends_once(), bar_shown() as progress:
        found = run(wanted, items, progress)
    _finish(found, out, as_json, json_file, every)


def _finish(found: Diagnosis, out: Path, as_json: bool, json_file: str | None, every: bool) -> None:
    """Show, write, and leave with 1 where there is nothing to build."""
    from ingot.evaluate.doctor.report import comments, record, tables, verdict

    command = command_line()
    told = record(found, command)
    if as_json:
        print_json(told)
    else:
        for table in tables(found, every=every):
            print_table(table)
            stdout().print()
        stdout().print(verdict(found), markup=False)
    if json_file is not None:
        _write(Path(json_file), json.dumps(finite(told), indent=1, ensure_ascii=False) + "\n")
    if found.quant is None:
        raise typer.Exit(_NONE_HOLDS)
    _write(out, quant_text(found.quant, comments(found, command)))
    stderr().print(
        f"written: {out}; ingot build {found.wanted.checkpoint} -o ENGINE --quant {out}", markup=False
    )


def _budget(text: str) -> float:
    """X of ``kl=X``."""
    name, _, value = text.partition("=")
    try:
        allowed = float(value)
    except ValueError:
        allowed = -1.0
    if name.strip() != _METRIC or not 0 < allowed < float("inf"):
        raise ConfigError(
            "invalid budget", seen=text, allowed="kl=X, in nats, X > 0", flag="--budget kl=0.01"
        )
    return allowed


def _check_target(path: Path, flag: str, ends: tuple[str, ...] = ()) -> None:
    """Refuse, before anything is computed, a place that cannot be written."""
    if ends and path.suffix not in ends:
        raise ConfigError(
            "`ingot build --quant` recognizes its files by their extension",
            seen=path,
            allowed=ends,
            flag=flag,
        )
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            "the file cannot be written",
            seen=path,
            allowed="a file in an existing, writable folder",
            flag=flag,
        )


def _write(path: Path, text: str) -> None:
    """The whole file or none: what was there stays until all is written."""
    part = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
