"""``ingot sweep``: precision by batch in one table and one picture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.opening import expect_model
from ingot.cli.options.flags import (
    AsJson,
    Device,
    Threads,
    field_flags,
    given,
    option,
)
from ingot.cli.terminal.console import command_line, print_json, print_report, stderr, stdout
from ingot.cli.terminal.signals import ends_once
from ingot.cli.terminal.step_list import status_shown
from ingot.config.quantization.scheme_table import sample_free_schemes
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.cli.measure.sweep_quality import DataQuality
    from ingot.measure.bench.sweep.sweep_line import Shape
    from ingot.measure.bench.sweep.sweep_session import Record
    from ingot.measure.side.side_spec import SideSpec

PROMPT_TOKENS, NEW_TOKENS = 512, 128
_FAILED = 1
_FILES = ("sweep.json", "sweep.html", "sweep.png")
_OUT = "Folder for points.jsonl, sweep.json, sweep.html, sweep.png."
_AGAINST = "hf (the Hugging Face class in the first dtype, as a line of its own) or hf:CHECKPOINT."
_RANDOM = "A config.json (or its folder), run with random weights instead of a checkpoint."
_KV_DTYPES = "Dtypes of the KV cache: model, int8, fp8, separated by commas."
_DTYPES = "fp16, bf16, fp32, separated by commas; auto: the model's own, fp32 on a CPU."
_BATCHES = "Batch sizes, separated by commas; auto doubles until one does not fit."
_DATA = "Quality: a text for perplexity; for Whisper recordings with their texts, for WER."
_CLIPS = "Whisper: clips, with LibriSpeech's distribution of lengths."
_OF_AUDIO = "Whisper: tokens per second of audio, whatever the weights say."
_SIDES = typer.Argument(
    help="Checkpoints, in every precision; engines, as they were built; hf:CHECKPOINT, Hugging Face's class. "
    "hf alone: of --random-weights.",
    metavar="CHECKPOINT|ENGINE|hf:CHECKPOINT...",
    show_default=False,
)
_REQUESTS = "The load: conversations in ShareGPT's JSON or one record per line, all at once."
_MAX_PROMPT = "With --requests: longer prompts are left out."
_MAX_NEW = "With --requests: longer answers are cut."
_SAMPLE = "With --requests: how many of them."
_SEED = "With --requests: draws the sample."
_CALIB = "Samples for the schemes that need them, as ingot build takes them."
_QUANT = (
    f"none (as the checkpoint is), {', '.join(sample_free_schemes())} or FILE.yaml, separated by commas; "
    "encoder=A,decoder=B is one."
)
_DRAW = "Measure nothing; draw the table and picture of the points in --out."


@dataclass(frozen=True)
class SweepFlags:
    """The model, its precisions and sizes, and where the results go."""

    checkpoint: Annotated[list[str] | None, _SIDES] = None
    random_weights: Annotated[str | None, option(_RANDOM)] = None
    out: Annotated[Path | None, option(_OUT, shown=False)] = None
    quant: Annotated[str, typer.Option(help=_QUANT)] = "none"
    kv_dtype: Annotated[str, option(_KV_DTYPES)] = "model"
    dtype: Annotated[str, option(_DTYPES)] = "auto"
    batch: Annotated[str, option(_BATCHES)] = "auto"
    prompt_tokens: Annotated[int | None, option("Tokens per prompt.", shown=str(PROMPT_TOKENS))] = None
    new_tokens: Annotated[int | None, option("Tokens generated per prompt.", shown=str(NEW_TOKENS))] = None
    requests: Annotated[Path | None, option(_REQUESTS)] = None
    max_prompt: Annotated[int | None, option(_MAX_PROMPT, shown="1024", min=1)] = None
    max_new: Annotated[int | None, option(_MAX_NEW, shown="1024", min=1)] = None
    sample: Annotated[int | None, option(_SAMPLE, shown="256", min=1)] = None
    seed: Annotated[int | None, option(_SEED, shown="0", min=0)] = None
    calib: Annotated[Path | None, option(_CALIB)] = None
    clips: Annotated[int | None, option(_CLIPS, shown="73", min=1)] = None
    tokens_per_second: Annotated[float | None, option(_OF_AUDIO, shown="4")] = None
    repeats: Annotated[int, option("Timed runs per point.")] = 3
    data: Annotated[Path | None, option(_DATA)] = None
    limit: Annotated[int | None, option("Use the first N items of --data.", min=1)] = None
    against: Annotated[str | None, option(_AGAINST, metavar="hf")] = None
    fresh: Annotated[bool, option("Discard the points already in --out.", "--fresh")] = False
    draw: Annotated[bool, option(_DRAW, "--draw")] = False
    no_png: Annotated[bool, option("Write no PNG.", "--no-png")] = False
    device: Device = None
    threads: Threads = None
    as_json: AsJson = False

    def quality(self, *, speech: bool) -> DataQuality | None:
        """The quality that is measured beside speed."""
        if self.data is None:
            if self.limit is not None:
                raise typer.BadParameter("--limit needs --data")
            return None
        if self.random_weights is not None:
            raise typer.BadParameter("random weights have no quality: --data needs a CHECKPOINT")
        from ingot.cli.measure.sweep_quality import DataQuality

        return DataQuality(str(self.data), self.limit, speech)

    def sides(self) -> list[SideSpec]:
        """What is measured, in the order given."""
        from ingot.measure.side.side_spec import HUGGINGFACE, INGOT, SideSpec, against_parts

        device = given(device=self.device)
        words = list(self.checkpoint or ())
        if self.random_weights is not None:
            if words not in ([], ["hf"]):
                raise typer.BadParameter("give either CHECKPOINT or --random-weights CONFIG")
            kind = HUGGINGFACE if words else INGOT
            return [SideSpec(kind=kind, random_weights=self.random_weights, **device)]
        found = []
        for word in words:
            is_class, path = against_parts(word)
            if path is None:
                raise typer.BadParameter(
                    "hf alone needs --random-weights; for a checkpoint give hf:CHECKPOINT", param_hint="hf"
                )
            found.append(SideSpec(path=path, kind=HUGGINGFACE if is_class else INGOT, **device))
        if not found:
            raise typer.BadParameter("give either CHECKPOINT or --random-weights CONFIG")
        return found

    def shape(self, sides: list[SideSpec], *, speech: bool) -> Shape:
        """The load of each point; refuses flags of the other kinds of load."""
        from ingot.measure.bench.latency import Latency
        from ingot.measure.bench.transcription_speed import TranscriptionBench

        of_text = given(prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)
        of_file = given(max_prompt=self.max_prompt, max_new=self.max_new, sample=self.sample, seed=self.seed)
        of_clips = given(clips=self.clips, tokens_per_second=self.tokens_per_second)
        if self.requests is None and of_file:
            raise typer.BadParameter("it is about --requests, which is not given", param_hint=_flags(of_file))
        if self.requests is not None and of_text:
            raise typer.BadParameter(
                "the lengths are those of --requests; limit them by --max-prompt and --max-new",
                param_hint=_flags(of_text),
            )
        of_prompts = of_text | given(requests=self.requests)
        odd = of_prompts if speech else of_clips
        if odd:
            kinds = ("prompts", "this is a speech model") if speech else ("clips", "this model takes text")
            raise typer.BadParameter(f"it is about {kinds[0]}, and {kinds[1]}", param_hint=_flags(odd))
        if speech:
            return TranscriptionBench(batches=(1,), repeats=self.repeats, **of_clips)
        if self.requests is not None:
            return self._request_load(self.requests, sides, of_file)
        lengths = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS} | of_text
        return Latency((1,), repeats=self.repeats, **lengths)

    def _request_load(self, path: Path, sides: list[SideSpec], limits: dict[str, int]) -> Shape:
        from ingot.measure.bench.sharegpt import RequestLimits
        from ingot.measure.bench.sweep.request_load import read_request_load
        from ingot.measure.side.side_spec import HUGGINGFACE, against_parts

        is_class, other = against_parts(self.against or "")
        if is_class and other is not None:
            sides = [*sides, sides[0].replace(path=other, kind=HUGGINGFACE, random_weights=None)]
        return read_request_load(path, sides, RequestLimits(**limits), self.repeats)


@field_flags("flags")
def sweep(flags: SweepFlags) -> None:
    """Measure speed, memory and quality by precision and batch size, until one no longer fits.

    Points are saved as they are measured: the same command resumes where the last one ended. Exit
    code 0: measured, including sizes that do not fit; 1: a process died; 2: usage error.
    """
    out, no_png = flags.out, flags.no_png
    if out is None:
        raise typer.BadParameter("give the folder for the results", param_hint="--out")
    if not no_png:
        from ingot.measure.bench.charts import check_matplotlib

        check_matplotlib()
    if flags.draw:
        _finish(out, flags)
        return
    for word in flags.checkpoint or ():
        if word not in ("hf", "hf:"):  # refused by name below
            expect_model(word.removeprefix("hf:"))
    from ingot.measure.bench.kernel_bench.kernel_times import read_shape
    from ingot.measure.bench.sweep.sweep_session import Sweep
    from ingot.measure.side.token_load import parse_batches

    sides = flags.sides()
    speech = not read_shape(sides[0]).config.modality.takes_text
    quality = flags.quality(speech=speech)
    wanted = Sweep(
        sides[0],
        dtypes=_words(flags.dtype, "dtype"),
        quants=_schemes(flags.quant),
        kv_dtypes=_words(flags.kv_dtype, "kv_dtype"),
        batches=() if flags.batch.strip() == "auto" else tuple(parse_batches(flags.batch)),
        shape=flags.shape(sides, speech=speech),
        against=flags.against,
        quality_of=None if quality is None else quality.to_json(),
        threads=flags.threads,
        beside=tuple(sides[1:]),
        calib=None if flags.calib is None else str(flags.calib),
    )
    done, before = False, _stored(out)
    try:
        with ends_once(), status_shown("starting") as say:
            from ingot.measure.bench.sweep.sweep_session import run_sweep

            run_sweep(wanted, out, quality=quality, fresh=flags.fresh, command=command_line(), say=say)
        done = True
    finally:
        # Interrupted, or one side cannot be loaded: show what there is.
        if not done and _stored(out) != before:
            with suppress(ConfigError, OSError):  # the error that ended it counts
                _write(out, no_png)
    if _finish(out, flags):
        raise typer.Exit(_FAILED)


def _stored(out: Path) -> bytes:
    """The points of a folder as they are in its file; empty without one."""
    from ingot.measure.bench.sweep.sweep_store import POINTS

    try:
        return (out / POINTS).read_bytes()
    except OSError:
        return b""


def _flags(fields: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in fields)


def _schemes(text: str) -> tuple[str, ...]:
    """Schemes and files; ``encoder=A,decoder=B`` is one scheme."""
    found: list[str] = []
    for word in _words(text, "quant"):
        pair = (found[-1], word) if found else ()
        halves = {one.partition("=")[0].strip() for one in pair if "=" in one and "," not in one}
        if len(halves) == 2:
            found[-1] += f",{word}"
        else:
            found.append(word)
    return tuple(found)


def _words(text: str, field: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ConfigError("expected names separated by commas", seen=repr(text), field=field)
    return words


def _finish(out: Path, flags: SweepFlags) -> bool:
    """Write and show the results of a folder's points; returns whether some could not be measured."""
    from ingot.measure.bench.sweep.sweep_report import broken, limits, sweep_lines, sweep_table, sweep_title

    record = _write(out, flags.no_png)
    if flags.as_json:
        print_json(record)
        return broken(record)
    print_report((sweep_title(record), *sweep_lines(record)), [sweep_table(record)])
    for line in limits(record):
        stdout().print(line, markup=False)
    for line in record["lines"]:
        for point in line["points"]:
            for doubt in point["doubts"]:
                stderr().print(f"warning: {line['name']}, {doubt}", markup=False)
    stderr().print(f"written: {', '.join(str(out / name) for name in _FILES if (out / name).exists())}")
    return broken(record)


def _write(out: Path, no_png: bool) -> Record:
    from ingot.measure.bench.charts import Page, write_html
    from ingot.measure.bench.sweep.sweep_record import record_of
    from ingot.measure.bench.sweep.sweep_report import limits, panels, sweep_lines, sweep_table, sweep_title
    from ingot.measure.bench.sweep.sweep_store import POINTS, read_points

    record = record_of(read_points(out / POINTS))
    (out / "sweep.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    title, lines, drawn = sweep_title(record), sweep_lines(record), panels(record)
    page = Page(title, lines, sweep_table(record), limits(record), record["commands"])
    write_html(drawn, page, out / "sweep.html")
    if drawn and not no_png:
        from ingot.measure.bench.charts import write_png

        write_png(drawn, title, lines, out / "sweep.png")
    return record
