"""``ingot transcribe --compare``: the same recordings by Hugging Face's class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from ingot.cli.options.flags import given
from ingot.cli.options.limit_flags import Limits, runtime_values
from ingot.cli.terminal.console import command_line, print_json, print_table, stderr, stdout
from ingot.cli.terminal.recordings import source_name, source_of, tell_failure
from ingot.cli.terminal.step_list import bar_shown

if TYPE_CHECKING:
    import torch

    from ingot.cli.options.transcribe_flags import TranscribeFlags
    from ingot.measure.side.side_spec import SideSpec
    from ingot.measure.side.timed_transcripts import TranscriptionRun

_FAILED = 1
_SIDES = ("ingot", "huggingface")
_FLAG = "--compare"


def compare(flags: TranscribeFlags, limits: Limits, names: Sequence[str], options: dict[str, Any]) -> None:
    """Transcribe all recordings on both sides, one after another, and show what is the same.

    The temperature is 0 unless given, so that neither side draws.
    """
    from ingot.measure.side.huggingface import check_huggingface
    from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec, against_parts
    from ingot.speech.speech_options import TranscribeOptions

    if flags.output is not None or flags.batch or flags.format not in ("txt", "json"):
        raise typer.BadParameter(
            "it prints a comparison (txt or json) and writes no transcripts", param_hint=_FLAG
        )
    asked = TranscribeOptions(**{"temperatures": (0.0,)} | options)
    is_class, path = against_parts(flags.compare or "")
    if not is_class:
        raise typer.BadParameter(f"{flags.compare}; it takes hf or hf:CHECKPOINT", param_hint=_FLAG)
    spec = SideSpec(
        flags.engine,
        max_seq_len=limits.max_seq_len,
        **given(device=flags.device, quant=flags.quant),
        **{name: value for name, value in runtime_values(limits).items() if name in vars(SideSpec())},
    )
    check_huggingface(path or flags.engine, "compare")
    specs = [spec, SideSpec(path or flags.engine, kind=HUGGINGFACE, device=spec.device)]
    samples = _read(names, allow_truncated=flags.allow_truncated)
    sides = [_transcribed(spec, name, samples, asked) for spec, name in zip(specs, _SIDES, strict=True)]
    record = _record(asked, list(samples), *sides)
    if flags.format == "json":
        print_json(record)
    elif samples:
        _show(record)
    if len(samples) < len(names):
        stderr().print(f"{len(names) - len(samples)} of {len(names)} recordings failed")
        raise typer.Exit(_FAILED)


def _read(names: Sequence[str], *, allow_truncated: bool) -> dict[str, torch.Tensor]:
    """The samples of each recording that can be read; the others are reported."""
    from ingot.audio.recording_samples import read_audio
    from ingot.errors import RequestError

    found = {}
    for name in names:
        try:
            source = source_of(name)
            key = source_name(name) if isinstance(source, bytes) else name
            found[key] = read_audio(source, allow_truncated=allow_truncated)
        except RequestError as error:
            tell_failure(name, error)
    return found


def _transcribed(spec: SideSpec, name: str, samples: dict[str, torch.Tensor], asked: Any) -> dict[str, Any]:
    from ingot.measure.side.timed_transcripts import transcribe_all
    from ingot.measure.side.transcribers import open_speech_side

    with bar_shown() as progress:
        progress(f"{name}: loading", 0, len(samples))
        with open_speech_side(spec, batch=1) as side:
            side.warm_up()
            found = transcribe_all(
                side, list(samples.values()), [asked] * len(samples),
                progress=lambda done: progress(name, done, len(samples)),
            )  # fmt: skip
            return {"name": name, "facts": side.facts(), "took": found}


def _record(asked: Any, names: Sequence[str], ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    a: TranscriptionRun = ours.pop("took")
    b: TranscriptionRun = theirs.pop("took")
    rows: list[dict[str, Any]] = [
        {
            "file": name,
            "audio_seconds": round(a.audio[i], 3),
            "same_text": a.transcripts[i].text == b.transcripts[i].text,
            "same_tokens": a.transcripts[i].token_ids == b.transcripts[i].token_ids,
            **{
                side: {"text": took.transcripts[i].text, "seconds": round(took.times[i], 4)}
                for side, took in zip(_SIDES, (a, b), strict=True)
            },
        }
        for i, name in enumerate(names)
    ]
    sides = [
        side | {"seconds": round(took.seconds, 4), "rtfx": took.rtfx}
        for side, took in ((ours, a), (theirs, b))
    ]
    same = sum(row["same_text"] for row in rows)
    return {
        "command": command_line(),
        "options": asked.to_json(),
        "sides": sides,
        "same": same,
        "different": len(rows) - same,
        "recordings": rows,
    }


def _show(record: dict[str, Any]) -> None:
    from ingot.measure.side.text_table import Table, number, times

    rows = [
        (
            row["file"],
            "same" if row["same_text"] else "different",
            number(row["audio_seconds"]),
            *(number(row[side]["seconds"]) for side in _SIDES),
        )
        for row in record["recordings"]
    ]
    title = f"{record['same']} same, {record['different']} different"
    print_table(Table(title, ("", "text", "audio s", *(f"{side} s" for side in _SIDES)), tuple(rows)))
    for row in record["recordings"]:
        if not row["same_text"]:
            stdout().print(f"\n{row['file']}", markup=False)
            for side in _SIDES:
                stdout().print(f"  {side}: {row[side]['text']}", markup=False)
    ours, theirs = (side["seconds"] for side in record["sides"])
    rates = " and ".join(f"{side['name']} {number(side['rtfx'])}" for side in record["sides"])
    stdout().print(f"\nRTFx: {rates}; {times(theirs / ours) if ours else '-'}", markup=False)
