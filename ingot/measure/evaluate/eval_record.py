"""The record of an evaluation, as JSON."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ingot.device import cpu_name, resolve_device
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.loss_limits import Limit, MetricDelta, judge, standard_error
from ingot.measure.side.side_spec import SideSpec
from ingot.version import VERSION, version_of

Record = dict[str, Any]
Scores = dict[str, float]
Progress = Callable[[str, int, int], None]
WITHIN, BEYOND = "within", "beyond"


def no_progress(what: str, done: int, total: int) -> None: ...


@dataclass
class SideRun:
    """Tokens that a side read and wrote, the seconds of both, and the metrics of its answers."""

    spec: SideSpec
    facts: dict[str, Any]
    seconds: float
    input_tokens: int
    output_tokens: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)
    audio_seconds: float | None = None
    pictures: int | None = None

    def to_json(self) -> Record:
        """The rates are over the whole time, prefill and decode."""
        found = {
            "name": self.spec.title,
            "spec": self.spec.to_json(),
            "facts": self.facts,
            "seconds": round(self.seconds, 4),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "input_tokens_per_s": _rate(self.input_tokens, self.seconds),
            "output_tokens_per_s": _rate(self.output_tokens, self.seconds) if self.output_tokens else None,
            "metrics": self.metrics,
        }
        if self.audio_seconds is not None:
            rtfx = round(self.audio_seconds / self.seconds, 3) if self.seconds > 0 else None
            found |= {"audio_seconds": round(self.audio_seconds, 3), "rtfx": rtfx}
        if self.pictures is not None:
            found |= {"pictures": self.pictures, "pictures_per_s": _rate(self.pictures, self.seconds)}
        return found


@dataclass
class ScoredSide:
    """A side's answers in the order of the items; ``scores`` are empty until ``score`` is called."""

    run: SideRun
    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: Sequence[str | None]
    scores: list[Scores] = field(default_factory=list)

    def score(
        self, score: Callable[[str, Sequence[str]], Scores], references: Sequence[Sequence[str]]
    ) -> None:
        """Score every answer against its references; the run's metrics are the means."""
        self.scores = [score(text, right) for text, right in zip(self.texts, references, strict=True)]
        self.run.metrics = {name: mean([one[name] for one in self.scores]) for name in self.scores[0]}

    def row(self, place: int, called: str) -> Record:
        """One answer, whose text is ``called`` so."""
        return {
            called: self.texts[place],
            "tokens": len(self.token_ids[place]),
            "finish_reason": self.finish_reasons[place],
            "scores": self.scores[place] if self.scores else None,
        }


def mean_deltas(limits: Sequence[Limit], ours: ScoredSide, theirs: ScoredSide) -> list[MetricDelta]:
    """Differences of metrics that are means over items, with their standard errors."""
    pairs = list(zip(ours.scores, theirs.scores, strict=True))
    return [
        replace(delta, stderr=standard_error([a[delta.metric] - b[delta.metric] for a, b in pairs]))
        for delta in judge(limits, ours.run.metrics, theirs.run.metrics)
    ]


def agreement(texts: Sequence[Sequence[str]], token_ids: Sequence[Sequence[Sequence[int]]]) -> Record:
    """How many answers of two sides are the same, as tokens and as text."""
    return {
        "answers": len(texts[0]),
        "same_tokens": sum(a == b for a, b in zip(*token_ids, strict=True)),
        "same_text": sum(a == b for a, b in zip(*texts, strict=True)),
    }


def differences(
    rows: list[Record], texts: Sequence[Sequence[str]], token_ids: Sequence[Sequence[Sequence[int]]]
) -> Record:
    """The agreement of two sides' transcripts or captions, and the rows whose texts differ."""
    same, differing = agreement(texts, token_ids), [row for row in rows if not row["same_text"]]
    return {"agreement": same | {"different_text": len(differing)}, "differing": differing}


@dataclass(frozen=True)
class Evaluation:
    """The record, and a row for each item."""

    record: Record
    rows: list[Record]

    @property
    def beyond(self) -> bool:
        return self.record["verdict"] == BEYOND


def make_record(
    verb: str,
    data: DataFile,
    settings: Mapping[str, Any],
    sides: Sequence[SideRun],
    deltas: Sequence[MetricDelta],
    **more: Any,
) -> Record:
    """The record of an evaluation; ``more`` is what only this verb has."""
    verdict = None
    if deltas:
        verdict = WITHIN if all(delta.within for delta in deltas) else BEYOND
    return {
        "verb": verb,
        "data": data.facts(),
        "settings": dict(settings),
        "machine": machine(resolve_device(sides[0].spec.device)),
        "sides": [side.to_json() for side in sides],
        **more,
        "deltas": [asdict(delta) for delta in deltas],
        "verdict": verdict,
    }


def machine(device: torch.device) -> Record:
    found = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ingot": VERSION,
        "rouge_score": version_of("rouge-score"),
        "jiwer": version_of("jiwer"),
        "whisper_normalizer": version_of("whisper-normalizer"),
    }
    return found | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 1) if seconds > 0 else None
