"""``ingot doctor``: which layers need their bits, and a file of schemes that keeps a budget."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.opening import expect_model
from ingot.cli.options.flags import (
    RARELY,
    AsJson,
    Checkpoint,
    Device,
    JsonFile,
    SkipBad,
    Threads,
    Where,
    field_flags,
    field_pairs,
    given,
    option,
    set_threads,
)
from ingot.cli.terminal.console import command_line, json_text, print_json, print_table, stderr, stdout
from ingot.cli.terminal.field_flags import in_flags
from ingot.cli.terminal.signals import ends_once
from ingot.cli.terminal.step_list import bar_shown
from ingot.config.quantization.quant_file import quant_text, read_quant
from ingot.config.quantization.scheme_table import (
    MILDEST,
    block_schemes,
    choosing,
    ladder_schemes,
    listed,
    saves_time_only,
)
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.measure.evaluate.doctor import Diagnosis

LIMIT = 64
_NONE_HOLDS = 1
_STARTS = listed(ladder_schemes(), "or")
_TIMED = listed(name for name in ladder_schemes() if saves_time_only(name))
_EITHER = listed(name for name in ladder_schemes() if not saves_time_only(name))
_GROUPED = listed(choosing("symmetric"))
_METRIC = "kl_mean"
_ENDS = (".yaml", ".yml")
_DATA = (
    "Texts similar to what it will run: .jsonl (one record per line), .json (a list), .txt (one text); "
    "for Whisper, recordings with their texts, as `ingot eval wer` reads them; for MiniGPT-4, pictures with "
    "captions, as `ingot eval caption` reads them."
)
_BUDGET = "Limit on the mean KL divergence of the next token, in nats."
_LEAST = f"What the mix minimizes: bytes or time. {_EITHER} take either, {_TIMED} only time."
_UP_TO = f"The highest precision that a layer may get: {MILDEST}, or none: the engine's dtype."
_GROUP = f"Columns per scale in {_GROUPED}: 32, 64, 128, or 0: one scale per row."
_SYMMETRIC = f"Whether {_GROUPED} goes without zero points."
_BLOCKS = listed(block_schemes(), "or")
_CALIB = f"Samples to calibrate {_BLOCKS} with, as for `ingot build`; others than --data."
_SAMPLES = "Maximum samples to use from --calib."


@dataclass(frozen=True)
class DoctorFlags:
    """The checkpoint, the data, the budget, and where the mix goes."""

    checkpoint: Checkpoint
    data: Annotated[Path, option(_DATA, shown=False)]
    quant: Annotated[str, option(f"The scheme to start from: {_STARTS}.", shown=False)]
    budget: Annotated[str, option(_BUDGET, shown=False, metavar="kl_mean=X")]
    least: Annotated[str | None, option(_LEAST, shown=f"bytes; {_TIMED}: time", metavar="bytes|time")] = None
    up_to: Annotated[str | None, option(_UP_TO, shown="none")] = None
    group_size: Annotated[int | None, option(_GROUP, shown="128", panel=RARELY)] = None
    symmetric: Annotated[
        bool | None, option(_SYMMETRIC, "--symmetric/--asymmetric", shown="asymmetric", panel=RARELY)
    ] = None
    calib: Annotated[Path | None, option(_CALIB)] = None
    calib_samples: Annotated[int | None, option(_SAMPLES, shown="128", panel=RARELY, min=1)] = None
    out: Annotated[Path, option("The file to write, for `ingot build --quant`.")] = Path("doctor.yaml")
    as_json: AsJson = False
    json_file: JsonFile = None
    every: Annotated[bool, option("Show every layer, not only the first 20.", "--all")] = False
    limit: Annotated[int, option("Use the first N items of --data.", min=1)] = LIMIT
    where: Where = None
    skip_bad: SkipBad = False
    window: Annotated[
        int | None, option("Tokens per window.", shown="the context, at most 1024", panel=RARELY, min=2)
    ] = None
    max_tokens: Annotated[
        int | None, option("Use the first N tokens of each text.", shown="2048", panel=RARELY, min=2)
    ] = None
    device: Device = None
    threads: Threads = None
    force: Annotated[bool, option("Replace an existing file.", "--force")] = False


@field_flags("flags")
def doctor(flags: DoctorFlags) -> None:
    """Measure what quantization costs layer by layer; write the mix of schemes that meets a budget.

    Exit code 0: the file holds a mix that was measured within the budget; 1: there is none, nothing is
    written; 2: usage error.
    """
    allowed, out = _budget(flags.budget), flags.out
    if out.suffix not in _ENDS:
        raise ConfigError(
            "`ingot build --quant` recognizes its files by their extension",
            seen=out,
            allowed=_ENDS,
            field="out",
        )
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        writable = "a file in an existing, writable folder"
        raise ConfigError("the file cannot be written", seen=out, allowed=writable, field="out")
    if out.exists() and not flags.force:
        raise ConfigError(
            "the file exists", seen=out, field="out", fix="--force replaces it; --out chooses another file"
        )
    chosen = read_quant(flags.quant, group=flags.group_size, symmetric=flags.symmetric)
    expect_model(flags.checkpoint)
    set_threads(flags.threads)
    from ingot.measure.evaluate.data_file import read_data
    from ingot.measure.evaluate.doctor import Wanted, check_wanted, needs_of, records_of
    from ingot.measure.evaluate.doctor import doctor as run
    from ingot.measure.evaluate.doctor.doctor_session import MAX_TOKENS
    from ingot.measure.evaluate.perplexity import WindowSettings

    reading = WindowSettings(flags.window, None, flags.max_tokens or MAX_TOKENS)
    options = given(least=flags.least, up_to=flags.up_to, device=flags.device)
    options |= given(calib=flags.calib, calib_samples=flags.calib_samples)
    wanted = Wanted(flags.checkpoint, chosen, allowed, reading=reading, **options)
    check_wanted(wanted)
    items = read_data(
        flags.data,
        limit=flags.limit,
        skip_bad=flags.skip_bad,
        where=field_pairs(flags.where),
        needs=needs_of(flags.checkpoint, flags.data),
        of_folder=records_of(flags.checkpoint),
    )
    with ends_once(), bar_shown() as progress:
        found = run(wanted, items, progress)
    _finish(found, flags)


def _finish(found: Diagnosis, flags: DoctorFlags) -> None:
    """Show and write the result; exit with 1 if no mix meets the budget."""
    from ingot.config.files.atomic_write import atomic_file
    from ingot.measure.evaluate.doctor.doctor_report import comments, record, tables, verdict

    command, out = command_line(), flags.out
    record_json = record(found, command)
    if flags.as_json:
        print_json(record_json)
    else:
        for table in tables(found, every=flags.every, more="--all"):
            print_table(table)
            stdout().print()
        stdout().print(in_flags(verdict(found)), markup=False)
    if flags.json_file is not None:
        with atomic_file(Path(flags.json_file)) as part:
            part.write_text(json_text(record_json), encoding="utf-8")
    if found.quant is None:
        raise typer.Exit(_NONE_HOLDS)
    with atomic_file(out) as part:
        part.write_text(quant_text(found.quant, comments(found, command)), encoding="utf-8")
    calib = f" --calib {flags.calib}" if found.quant.calibrated else ""
    line = f"written: {out}; ingot build {found.wanted.checkpoint} -o ENGINE --quant {out}{calib}"
    stderr().print(line, markup=False)


def _budget(text: str) -> float:
    name, _, value = text.partition("=")
    try:
        allowed = float(value)
    except ValueError:
        allowed = -1.0
    if name.strip() != _METRIC or not 0 < allowed < float("inf"):
        raise ConfigError(
            "invalid budget",
            seen=text,
            allowed="kl_mean=X, in nats, X > 0",
            field="budget",
            fix="--budget kl_mean=0.01",
        )
    return allowed
