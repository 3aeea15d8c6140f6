"""``ingot eval``: how good an engine's answers are, and whether they are still the reference's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.opening import expect_model
from ingot.cli.options.flags import (
    DTYPES,
    RARELY,
    AsJson,
    Device,
    EngineOrCheckpoint,
    JsonFile,
    Quant,
    SkipBad,
    Threads,
    Where,
    field_flags,
    field_pairs,
    given,
    option,
    set_threads,
    writable_file,
)
from ingot.cli.options.limit_flags import (
    Embedding,
    KvDtype,
    MemoryFraction,
    TokenBudget,
    max_seq_len,
    runtime_values,
)
from ingot.cli.options.transcribe_flags import transcribe_flags_at
from ingot.cli.terminal.console import command_line, finite, json_text, print_json, print_report, stdout
from ingot.cli.terminal.step_list import bar_shown

if TYPE_CHECKING:
    from ingot.measure.evaluate.data_file import OfFolder
    from ingot.measure.evaluate.data_item import DataItem
    from ingot.measure.evaluate.eval_record import Evaluation
    from ingot.measure.evaluate.loss_limits import Limit
    from ingot.measure.evaluate.perplexity import WindowSettings
    from ingot.measure.evaluate.score_bounds import ScoreBound
    from ingot.measure.evaluate.scored_answers import AnswerSettings
    from ingot.measure.evaluate.scored_captions import CaptionSettings
    from ingot.measure.evaluate.scored_transcripts import WerSettings
    from ingot.measure.side.side_spec import SideSpec

_BEYOND = 1
_LANG = "What ROUGE counts: en (words), zh (characters), or auto: characters if the reference has CJK."
_TEMPLATE = "a request in chat, '{article} TL;DR:' otherwise"


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise typer.BadParameter(f"{value}; allowed: {', '.join(DTYPES)}")
    return value


_DATA = (
    "Items: .jsonl (one record per line), .json (a list of records), .csv, .parquet, hf:ID[:CONFIG]:SPLIT (a "
    "data set of the hub), .txt (running text); for wer also a folder in LibriSpeech's layout, for caption "
    "one of pictures."
)
_AGAINST = (
    "The reference: hf (the Hugging Face class on the same checkpoint), hf:CHECKPOINT, or another engine or "
    "checkpoint."
)
_DELTA = "Limit on |difference| for exit code 0: X, or METRIC=X; may be repeated."
_AT_LEAST = "The lowest score of the engine and of each --also for exit code 0: rouge1=14 (0 to 100)."
_AT_MOST = "Likewise the highest score, where lower is better: wer=6, perplexity=9."
_DTYPE = "Compute dtype: fp16, bf16, fp32, or auto: the model's, fp32 on a CPU."
_CHAT = "Wrap articles and prompts as user messages in the chat template."
_SYSTEM = "A system message before each conversation without one; implies --chat."
_ALSO = (
    "One more side in the same tables: a precision of the same checkpoint (fp16, w8a16, FILE.yaml) or "
    "another engine; may be repeated."
)
_STRIDE = "Tokens from one window to the next; only the last N of each window count."


@dataclass(frozen=True)
class EvalFlags:
    """What is evaluated, on which data, against which reference."""

    engine: Annotated[str, EngineOrCheckpoint]
    data: Annotated[Path, option(_DATA, shown=False)]
    against: Annotated[str | None, option(_AGAINST, metavar="hf|CHECKPOINT")] = None
    limit: Annotated[int | None, option("Use the first N items.", min=1)] = None
    max_delta: Annotated[list[str] | None, option(_DELTA, metavar="X|METRIC=X", shown="by metric")] = None
    at_least: Annotated[list[str] | None, option(_AT_LEAST, "--min", metavar="METRIC=X", shown=False)] = None
    at_most: Annotated[list[str] | None, option(_AT_MOST, "--max", metavar="METRIC=X", shown=False)] = None
    as_json: AsJson = False
    json_file: JsonFile = None
    items: Annotated[
        str | None, option("Write one line of JSON per item.", metavar="FILE", callback=writable_file)
    ] = None
    skip_bad: SkipBad = False
    where: Where = None
    dtype: Annotated[str, option(_DTYPE, callback=_dtype)] = "auto"
    quant: Quant = None
    against_dtype: Annotated[
        str | None, option("Compute dtype of the reference.", shown="as --dtype", panel=RARELY)
    ] = None
    against_batch: Annotated[
        int, option("Prompts per padded batch, for --against hf.", panel=RARELY, min=1)
    ] = 8
    max_seq_len: Annotated[int | None, max_seq_len(2)] = None
    memory_fraction: MemoryFraction = None
    token_budget: TokenBudget = None
    kv_dtype: KvDtype = None
    embedding: Embedding = None
    device: Device = None
    threads: Threads = None

    def sides(self) -> tuple[SideSpec, SideSpec | None]:
        """The evaluated side and the reference."""
        from ingot.measure.side.side_spec import SideSpec, other_spec

        spec = SideSpec(
            self.engine,
            dtype=self.dtype,
            max_seq_len=self.max_seq_len,
            **given(device=self.device, quant=self.quant),
            **runtime_values(self),
        )
        if self.against is None:
            return spec, None
        dtype = self.dtype if self.against_dtype is None else _dtype(self.against_dtype)
        return spec, other_spec(spec, self.against, dtype, self.against_batch)


@dataclass(frozen=True)
class AskFlags(EvalFlags):
    """Evaluations that generate answers."""

    max_new_tokens: Annotated[int, option("Maximum new tokens per answer.", min=1)] = 128
    chat: Annotated[
        bool | None, option(_CHAT, "--chat/--no-chat", shown="articles, if the engine has a template")
    ] = None
    also: Annotated[list[str] | None, option(_ALSO, metavar="PRECISION|ENGINE", shown=False)] = None
    system: Annotated[str | None, option(_SYSTEM, metavar="TEXT", shown="the template's own")] = None

    def sides(self) -> tuple[SideSpec, SideSpec | None]:
        """The evaluated side, with a name of its own beside others, and the reference."""
        from ingot.measure.side.side_spec import specs_with

        spec, other = super().sides()
        return specs_with(spec, self.also)[0] if self.also else spec, other

    def also_sides(self) -> list[SideSpec]:
        """The sides of --also."""
        from ingot.measure.side.side_spec import specs_with

        return specs_with(super().sides()[0], self.also)[1:] if self.also else []


@dataclass(frozen=True)
class WerFlags(EvalFlags):
    """The evaluation of transcripts."""

    batch: Annotated[
        int | None, option("Recordings at once; 1: one after another.", shown="as built", min=1)
    ] = None


@dataclass(frozen=True)
class EvalCaptionFlags(EvalFlags):
    """The evaluation of captions."""

    prompt: Annotated[str, option("What is asked about each picture.")] = "Describe this image."
    max_new_tokens: Annotated[int, option("Maximum new tokens per caption.", min=1)] = 300


@dataclass(frozen=True)
class ReadFlags(EvalFlags):
    """Evaluations that read running text."""

    window: Annotated[int | None, option("Tokens per window.", shown="the smaller context", min=2)] = None
    stride: Annotated[int | None, option(_STRIDE, min=1)] = None
    max_tokens: Annotated[int | None, option("Use the first N tokens of each text.", panel=RARELY, min=2)] = (
        None
    )

    def reading(self) -> WindowSettings:
        from ingot.measure.evaluate.perplexity import WindowSettings

        return WindowSettings(self.window, self.stride, self.max_tokens)


evaluate = typer.Typer(
    name="eval",
    help="Evaluate an engine: summaries, perplexity, divergence from a reference, exact answers, "
    "transcripts, captions."
    "\n\n"
    "Exit code 0: done, every difference from the reference is within its limit, every score within its "
    "bound; 1: one is not; 2: usage error.",
    no_args_is_help=True,
    add_completion=False,
)


@evaluate.command()
@field_flags("flags")
def summarize(
    flags: AskFlags,
    lang: Annotated[str, option(_LANG)] = "auto",
    stemmer: Annotated[bool, option("Stem English words before counting.", "--stemmer")] = False,
    template: Annotated[str | None, option("Prompt text around {article}.", shown=_TEMPLATE)] = None,
) -> None:
    """ROUGE-1, 2, L and Lsum of greedy summaries. Needs the package rouge-score (Ingot's extra "eval")."""
    expect_model(flags.engine)
    from ingot.measure.evaluate.scored_answers import AnswerSettings, question_check
    from ingot.measure.evaluate.scored_answers import summarize as run

    asking = AnswerSettings(flags.max_new_tokens, flags.chat, template, lang, stemmer, flags.system)
    _evaluate(flags, "summarize", partial(run, also=flags.also_sides()), asking, question_check)


@evaluate.command()
@field_flags("flags")
def answers(flags: AskFlags) -> None:
    """Share of greedy answers that equal a reference, and that contain one (normalised as in SQuAD)."""
    expect_model(flags.engine)
    from ingot.measure.evaluate.scored_answers import AnswerSettings, question_check
    from ingot.measure.evaluate.scored_answers import answers as run

    asking = AnswerSettings(flags.max_new_tokens, flags.chat, system=flags.system)
    _evaluate(flags, "answers", partial(run, also=flags.also_sides()), asking, question_check)


@evaluate.command()
@field_flags("flags")
def perplexity(flags: ReadFlags) -> None:
    """Perplexity and bits per byte of running text, with sliding windows."""
    expect_model(flags.engine)
    from ingot.measure.evaluate.perplexity import perplexity as run

    _evaluate(flags, "perplexity", run, flags.reading())


@evaluate.command()
@field_flags("flags")
def divergence(flags: ReadFlags) -> None:
    """KL(reference || engine) and agreement of the likeliest token, on the same tokens.

    --against names the reference. Without --stride the windows do not overlap.
    """
    expect_model(flags.engine)
    from ingot.measure.evaluate.token_divergence import divergence as run

    if flags.against is None:
        _start(flags, "divergence")
        raise typer.BadParameter("divergence needs a reference", param_hint="--against")
    _evaluate(flags, "divergence", run, flags.reading())


@evaluate.command()
@field_flags("flags")
def caption(
    flags: EvalCaptionFlags,
    lang: Annotated[str, option(_LANG)] = "auto",
    stemmer: Annotated[bool, option("Stem English words before counting.", "--stemmer")] = False,
) -> None:
    """ROUGE of greedy captions of pictures, and the time of both sides. Needs Ingot's extras "eval,image".

    Without captions in the data they are compared with those of --against.
    """
    expect_model(flags.engine)
    from ingot.image.picture_folder import picture_records
    from ingot.measure.evaluate.scored_captions import CaptionSettings, picture_check
    from ingot.measure.evaluate.scored_captions import caption as run

    folder = flags.data if flags.data.is_dir() else flags.data.parent
    asked = CaptionSettings(flags.prompt, flags.max_new_tokens, lang, stemmer)
    _evaluate(flags, "caption", run, asked, picture_check(folder), picture_records)


@evaluate.command()
@field_flags("flags")
@transcribe_flags_at(temperatures=(0.0,))
def wer(flags: WerFlags, options: dict[str, Any]) -> None:
    """Word and character error rates of transcripts. Needs Ingot's extra "eval".

    Texts are normalised as Whisper's own evaluation does it. The temperature is 0, so that both sides draw
    nothing.
    """
    expect_model(flags.engine)
    from ingot.measure.evaluate.scored_transcripts import WerSettings, recording_check
    from ingot.measure.evaluate.scored_transcripts import wer as run
    from ingot.speech.speech_options import TranscribeOptions

    folder = flags.data if flags.data.is_dir() else flags.data.parent
    _evaluate(
        flags, "wer", run, WerSettings(TranscribeOptions(**options), flags.batch), recording_check(folder)
    )


def _start(flags: EvalFlags, verb: str) -> tuple[tuple[Limit, ...], tuple[ScoreBound, ...]]:
    """Set the threads; returns the limits of differences and the bounds of scores."""
    from ingot.measure.evaluate.loss_limits import limits_for
    from ingot.measure.evaluate.score_bounds import bounds_for

    if flags.max_delta and flags.against is None:
        raise typer.BadParameter(
            "it needs --against, the reference to compare with", param_hint="--max-delta"
        )
    set_threads(flags.threads)
    return limits_for(verb, flags.max_delta or ()), bounds_for(
        verb, flags.at_least or (), flags.at_most or ()
    )


def _evaluate(
    flags: EvalFlags,
    verb: str,
    run: Callable[..., Evaluation],
    how: AnswerSettings | WindowSettings | WerSettings | CaptionSettings,
    needs: Callable[[DataItem], str | None] = lambda item: None,
    of_folder: OfFolder | None = None,
) -> None:
    """Evaluate, show and write; exit with 1 if a difference or a score is beyond its limit."""
    from ingot.measure.evaluate.data_file import read_data
    from ingot.measure.evaluate.eval_report import headline, tables, verdict
    from ingot.measure.evaluate.score_bounds import with_bounds

    limits, bounds = _start(flags, verb)
    where, limit, skip = field_pairs(flags.where), flags.limit, flags.skip_bad
    records = {} if of_folder is None else {"of_folder": of_folder}
    data = read_data(flags.data, limit=limit, skip_bad=skip, where=where, needs=needs, **records)
    with bar_shown() as progress:
        sides = flags.sides()
        found = run(*sides, data, limits, how, progress)
        found = with_bounds(found, bounds, against=sides[1] is not None)
    record = {"command": command_line(), **found.record}
    if flags.items is not None:
        lines = (json.dumps(finite(row), ensure_ascii=False) + "\n" for row in found.rows)
        Path(flags.items).write_text("".join(lines), encoding="utf-8")
    if flags.json_file is not None:
        Path(flags.json_file).write_text(json_text(record), encoding="utf-8")
    if flags.as_json:
        print_json(record)
    else:
        print_report(headline(record), tables(record))
        summary = verdict(record)
        if summary is not None:
            stdout().print(f"\n{summary}", markup=False)
    if found.beyond:
        raise typer.Exit(_BEYOND)
