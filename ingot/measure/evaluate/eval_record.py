"""What an evaluation leaves behind.

Owns the record that is printed as JSON: where, on what, with which settings, both sides' times and metrics,
their differences and the verdict. Knows no metric in particular.

    record = make_record("perplexity", data, settings, sides, deltas)
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ingot.device import cpu_name, resolve_device
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.loss_limits import MetricDelta
from ingot.measure.side.side_spec import SideSpec
from ingot.version import VERSION, version_of

Record = dict[str, Any]
Progress = Callable[[str, int, int], None]
WITHIN, BEYOND = "within", "beyond"


def no_progress(what: str, done: int, total: int) -> None: ...


@dataclass
class SideRun:
    """What a side did: tokens read and written, the seconds of both, and the metrics that came of it."""

    spec: SideSpec
    facts: dict[str, Any]
    seconds: float
    input_tokens: int
    output_tokens: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)
    audio_seconds: float | None = None  # of recordings
    pictures: int | None = None

    def to_json(self) -> Record:
        """As a record keeps it; the rates are of the whole time, prefill and decode together."""
        return {
            "name": self.spec.title,
            "spec": self.spec.to_json(),
            "facts": self.facts,
            "seconds": round(self.seconds, 4),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "input_tokens_per_s": _rate(self.input_tokens, self.seconds),
            "output_tokens_per_s": _rate(self.output_tokens, self.seconds) if self.output_tokens else None,
            "metrics": self.metrics,
            **self._audio(),
            **self._picture_rate(),
        }

    def _picture_rate(self) -> Record:
        """Pictures per second, from file to caption."""
        if self.pictures is None:
            return {}
        return {"pictures": self.pictures, "pictures_per_s": _rate(self.pictures, self.seconds)}

    def _audio(self) -> Record:
        """RTFx: seconds of audio per second."""
        if self.audio_seconds is None:
            return {}
        rtfx = round(self.audio_seconds / self.seconds, 3) if self.seconds > 0 else None
        return {"audio_seconds": round(self.audio_seconds, 3), "rtfx": rtfx}


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
        "deltas": [delta.to_json() for delta in deltas],
        "verdict": verdict,
    }


def machine(device: torch.device) -> Record:
    """Processor and versions that figures were made with."""
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
