"""Transcripts of one or two sides of the same recordings, scored by error rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ingot.audio.recording_samples import audio_seconds
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.data_item import DataItem
from ingot.measure.evaluate.eval_record import (
    Evaluation,
    Progress,
    Record,
    SideRun,
    differences,
    make_record,
    no_progress,
)
from ingot.measure.evaluate.loss_limits import Limit, judge
from ingot.measure.evaluate.wer import Wer
from ingot.measure.side.open_side import check_side
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec
from ingot.measure.side.timed_transcripts import TranscriptionRun, transcribe_all
from ingot.measure.side.transcribers import open_speech_side
from ingot.speech.recording_features import mel_bins
from ingot.speech.speech_options import TranscribeOptions
from ingot.text.languages import language_code

_QUEUED = 8  # recordings that wait for each that is transcribed


@dataclass(frozen=True)
class WerSettings:
    """How recordings are transcribed, and how many at once by an engine (None: its limit). A recording's own
    language overrides that of the options.
    """

    options: TranscribeOptions = field(default_factory=lambda: TranscribeOptions(temperatures=(0.0,)))
    batch: int | None = None


@dataclass
class _Side:
    run: SideRun
    took: TranscriptionRun

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.took.transcripts]


def recording_check(folder: Path) -> Callable[[DataItem], str | None]:
    """Why an item cannot be used; its recording's path is relative to ``folder``."""

    def why(item: DataItem) -> str | None:
        if item.audio is None:
            return "no audio with its text"
        path = folder / item.audio
        if not path.is_file():
            return f"there is no such audio file: {path}"
        return None if audio_seconds(path) else f"no audio that can be read: {path}"

    return why


def wer(
    spec: SideSpec,
    other: SideSpec | None,
    data: DataFile,
    limits: Sequence[Limit],
    asked: WerSettings,
    progress: Progress = no_progress,
) -> Evaluation:
    """WER and CER of both sides in percent, over all recordings together."""
    metric = Wer()
    specs = [spec] if other is None else [spec, other]
    for one in specs:
        check_side(one)
        mel_bins(one.config())
    sides = [_transcribed(one, data, asked, progress) for one in specs]
    languages = [
        _language(item, asked.options) or one.language or "en"
        for item, one in zip(data.items, sides[0].took.transcripts, strict=True)
    ]
    right = [item.text or "" for item in data.items]
    for side in sides:
        side.run.metrics = asdict(metric.rates(right, side.texts, languages))
    deltas = [] if other is None else judge(limits, sides[0].run.metrics, sides[1].run.metrics)
    rows = [_row(metric, place, item, languages, sides) for place, item in enumerate(data.items)]
    counts = {"recordings": len(rows), "audio_seconds": round(sum(sides[0].took.audio), 3)}
    more: Record = {"counts": counts, "agreement": None, "differing": []}
    if other is not None:
        token_ids = [[one.token_ids for one in side.took.transcripts] for side in sides]
        more |= differences(rows, [side.texts for side in sides], token_ids)
    settings = asked.options.to_json() | {"batch": asked.batch}
    runs = [side.run for side in sides]
    return Evaluation(make_record("wer", data, settings, runs, deltas, **more), rows)


def _transcribed(spec: SideSpec, data: DataFile, asked: WerSettings, progress: Progress) -> _Side:
    """An engine takes recordings from a queue, a class in its batches."""
    total = len(data.items)
    progress(f"{spec.title}: loading", 0, total)
    paths = [data.folder / (item.audio or "") for item in data.items]
    options = [asked.options.replace(language=_language(item, asked.options)) for item in data.items]
    is_class = spec.kind == HUGGINGFACE
    with open_speech_side(spec, batch=spec.max_batch_size if is_class else asked.batch) as side:
        side.warm_up()
        facts = side.facts()
        most = int(facts["batch"])
        together = most if most == 1 else _QUEUED * most
        took = transcribe_all(side, paths, options, together, lambda done: progress(spec.title, done, total))
    tokens = sum(len(one.token_ids) for one in took.transcripts)
    return _Side(SideRun(spec, facts, took.seconds, 0, tokens, audio_seconds=sum(took.audio)), took)


def _language(item: DataItem, options: TranscribeOptions) -> str | None:
    return options.language if item.language is None else language_code(item.language)


def _row(metric: Wer, place: int, item: DataItem, languages: Sequence[str], sides: Sequence[_Side]) -> Record:
    row: dict[str, Any] = {
        "number": item.number,
        "id": item.id,
        "audio": item.audio,
        "audio_seconds": round(sides[0].took.audio[place], 3),
        "language": languages[place],
        "text": item.text,
        "same_text": len({side.texts[place] for side in sides}) == 1,
    }
    for side in sides:
        one = side.took.transcripts[place]
        rates = metric.rates([item.text or ""], [one.text], [languages[place]])
        row[side.run.spec.title] = {"text": one.text, "language": one.language, **asdict(rates)}
    return row
