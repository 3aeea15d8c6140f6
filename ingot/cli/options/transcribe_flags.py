"""Flags of ``ingot transcribe``: recordings, subtitles, and one per field of ``TranscribeOptions``."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ingot.cli.options.flags import Device, EnginePath, Quant, Threads, flags_for, option
from ingot.cli.terminal.field_flags import flag_of

if TYPE_CHECKING:
    from ingot.speech.subtitles import SubtitleLayout

FORMATS = ("txt", "srt", "vtt", "tsv", "json")
_LAID_OUT = ("srt", "vtt")
_OFTEN = (
    *("language", "task", "word_timestamps", "temperatures", "beam_size", "best_of"),
    *("initial_prompt", "carry_initial_prompt", "hotwords", "no_speech"),
)
_PANEL, _RARE_PANEL = "Transcription", "Transcription, rarely needed"


def _format(value: str) -> str:
    if value not in FORMATS:
        raise typer.BadParameter(f"{value}; allowed: {', '.join(FORMATS)}", param_hint="--format")
    return value


_FILES = "Recordings (wav, flac, mp3, m4a, ogg, webm …), videos, folders of them, or -: stdin."
_OUTPUT = "Folder for a file per recording, named after it."
_BATCH = "Transcribe several recordings at once; each says what it says alone."
_TRUNCATED = "Transcribe what is there of files that were cut off or damaged."
_COMPARE = (
    "Also transcribe with Hugging Face's class, and print what is the same and both times instead of the "
    "transcripts: hf (the same checkpoint) or hf:CHECKPOINT. The temperature is 0 unless it is given."
)
_SUBTITLES = "Subtitles, with --word-timestamps"
_WIDTH = "Characters of a line."
_COUNT = "Lines of a subtitle; with --max-line-width."
_WORDS = "Words of a subtitle."
_HIGHLIGHT = "A subtitle for each word, in which it is underlined."


@dataclass(frozen=True)
class TranscribeFlags:
    """The engine, the recordings, where transcripts go, and how subtitles look."""

    engine: EnginePath
    files: Annotated[list[str], typer.Argument(help=_FILES, metavar="FILE…")]
    format: Annotated[
        str, option("What to write.", "--format", "-f", callback=_format, metavar="|".join(FORMATS))
    ] = "txt"
    output: Annotated[
        Path | None, option(_OUTPUT, "--output", "-o", shown="one file: stdout; several: this folder")
    ] = None
    batch: Annotated[bool, option(_BATCH, "--batch")] = False
    allow_truncated: Annotated[bool, option(_TRUNCATED, "--allow-truncated")] = False
    compare: Annotated[str | None, option(_COMPARE, metavar="hf")] = None
    max_line_width: Annotated[int | None, option(_WIDTH, min=1, panel=_SUBTITLES)] = None
    max_line_count: Annotated[int | None, option(_COUNT, min=1, panel=_SUBTITLES)] = None
    max_words_per_line: Annotated[int | None, option(_WORDS, min=1, panel=_SUBTITLES)] = None
    highlight_words: Annotated[bool, option(_HIGHLIGHT, panel=_SUBTITLES)] = False
    quant: Quant = None
    device: Device = None
    threads: Threads = None


def layout_of(flags: TranscribeFlags, options: dict[str, Any]) -> SubtitleLayout:
    """The layout of subtitles; refuses a flag that has no effect."""
    from ingot.speech.subtitles import SubtitleLayout

    names = [field.name for field in fields(SubtitleLayout)]
    given = {name: getattr(flags, name) for name in names if getattr(flags, name)}
    for name in given:
        if flags.format not in _LAID_OUT:
            text = f"needs --format {' or '.join(_LAID_OUT)}; seen: {flags.format}"
            raise typer.BadParameter(text, param_hint=flag_of(name))
        if not options.get("word_timestamps"):
            raise typer.BadParameter("needs --word-timestamps", param_hint=flag_of(name))
    if "max_line_count" in given and "max_line_width" not in given:
        raise typer.BadParameter("needs --max-line-width", param_hint=flag_of("max_line_count"))
    return SubtitleLayout(**given)


def transcribe_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace a verb's ``options`` parameter by a flag per transcription option. The given ones arrive as a
    dict, checked.
    """
    return transcribe_flags_at()(verb)


def transcribe_flags_at(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``transcribe_flags`` with other defaults for some options."""
    flags, parsers = _flags(defaults)

    def pack(values: dict[str, Any]) -> dict[str, Any]:
        from ingot.speech.speech_options import TranscribeOptions

        options = dict(defaults)
        for name, value in values.items():
            if value is not None:
                try:
                    options[name] = parsers[name](value)
                except ValueError:
                    raise typer.BadParameter(f"{value} is not a number", param_hint=flag_of(name)) from None
        TranscribeOptions(**options)  # refuses what is out of range
        return options

    return lambda verb: flags_for(verb, "options", flags, pack)


def _flags(defaults: dict[str, Any]) -> tuple[list[inspect.Parameter], dict[str, Callable[[Any], Any]]]:
    from ingot.speech.speech_options import TranscribeOptions

    hints = typing.get_type_hints(TranscribeOptions)
    attributes = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", TranscribeOptions.__doc__ or "", re.MULTILINE)
    help_texts = {name: " ".join(text.split()).replace("``", "`") for name, text in attributes}
    flags: list[inspect.Parameter] = []
    parsers = {}
    for field in fields(TranscribeOptions):
        made = _kind(hints[field.name])
        if made is None:
            continue
        kind, parsers[field.name], metavar = made
        default = defaults.get(field.name, field.default)
        name, no = flag_of(field.name), "--no-" + field.name.replace("_", "-")
        option = typer.Option(
            f"{name}/{no}" if kind is bool and default else name,
            help=help_texts.get(field.name, "")[:1].upper() + help_texts.get(field.name, "")[1:],
            metavar=metavar,
            rich_help_panel=_PANEL if field.name in _OFTEN else _RARE_PANEL,
            show_default=_shown(default),
        )
        annotation: Any = Annotated[kind | None, option]
        flags.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return flags, parsers


def _kind(hint: Any) -> tuple[Any, Callable[[Any], Any], str | None] | None:
    """An option's type on the command line, its parser and its metavar; None if it can have no flag."""
    inner = [one for one in typing.get_args(hint) if one is not type(None)]
    may_be_none = type(None) in typing.get_args(hint)
    plain = inner[0] if may_be_none and len(inner) == 1 else hint
    if typing.get_origin(plain) is tuple:
        one = typing.get_args(plain)[0]
        return str, lambda text: tuple(one(part) for part in text.split(",") if part.strip()), "X,X,…"
    if typing.get_origin(plain) is Literal:
        return str, str, "|".join(typing.get_args(plain))
    if plain in (int, float) and may_be_none:
        return str, lambda text: None if text.strip().lower() == "none" else plain(text), "X|none"
    return (plain, plain, None) if plain in (str, int, float, bool) else None


def _shown(default: Any) -> str | bool:
    if isinstance(default, tuple):
        return ",".join(f"{one:g}" for one in default)
    return False if default is None or isinstance(default, bool) else str(default)
