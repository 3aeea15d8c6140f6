"""What a sweep measures the quality of a precision with.

Covers the way from a sweep to ``ingot eval``'s perplexity, and its WER for a speech model: a sweep knows no
metric, and an evaluation no sweep.

    quality = TextQuality("held_out.jsonl", limit=100)
    quality(SideSpec(path="models/pocket-chat", dtype="bf16"))      # {"perplexity": 7.31}
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.measure.evaluate.data_file import DataFile
    from ingot.measure.side.side_spec import SideSpec

_METRIC = "perplexity"
_OF_SPEECH = "wer"


@dataclass(frozen=True)
class TextQuality:
    """Perplexity on the first ``limit`` items of a file (None: all)."""

    data: str
    limit: int | None = None

    def __call__(self, spec: SideSpec) -> dict[str, float]:
        """The perplexity of what the spec names.

        Raises:
            IngotError: the side or the data cannot be read.
        """
        from ingot.measure.evaluate.data_file import read_data
        from ingot.measure.evaluate.perplexity import perplexity

        items = read_data(Path(self.data), limit=self.limit)
        found = perplexity(_evaluated(spec), None, items, ())
        metrics = found.record["sides"][0]["metrics"]
        return {_METRIC: metrics[_METRIC]}

    def to_json(self) -> dict[str, Any]:
        """For the record: metric, file and its hash, items taken at most."""
        digest = hashlib.sha256(Path(self.data).read_bytes()).hexdigest()[:16]
        return {"metric": _METRIC, "file": self.data, "sha256": digest, "limit": self.limit}


@dataclass(frozen=True)
class SpeechQuality:
    """WER in percent on the first ``limit`` recordings of a manifest (None: all), greedy."""

    data: str
    limit: int | None = None

    def __call__(self, spec: SideSpec) -> dict[str, float]:
        """The WER of what the spec names; none where the texts have no words.

        Raises:
            IngotError: the side or the data cannot be read, or a library is not installed.
        """
        from ingot.measure.evaluate.scored_transcripts import WerSettings, wer

        found = wer(_evaluated(spec), None, self._items(), (), WerSettings())
        rate = found.record["sides"][0]["metrics"][_OF_SPEECH]
        return {} if rate is None else {_OF_SPEECH: rate}

    def to_json(self) -> dict[str, Any]:
        """For the record: metric, manifest and its hash, recordings taken at most.

        Raises:
            ConfigError: the manifest cannot be read, or names no recordings.
        """
        digest = self._items().facts()["sha256"][:16]
        return {"metric": _OF_SPEECH, "file": self.data, "sha256": digest, "limit": self.limit}

    def _items(self) -> DataFile:
        from ingot.measure.evaluate.data_file import read_data
        from ingot.measure.evaluate.scored_transcripts import recording_check

        path = Path(self.data)
        needs = recording_check(path if path.is_dir() else path.parent)
        return read_data(path, limit=self.limit, needs=needs)


def _evaluated(spec: SideSpec) -> SideSpec:
    """The same side, as evaluations open it."""
    from ingot.measure.side.side_spec import SideSpec

    if spec.path is None:
        raise ConfigError(
            "random weights have no quality to measure",
            seen="--data",
            field="data",
            fix="--data: leave it out",
        )
    names = ("path", "kind", "device", "dtype", "quant", "kv_dtype")
    return SideSpec(**{name: getattr(spec, name) for name in names})


def text_quality(data: Path, limit: int | None) -> TextQuality:
    """The quality on a file, made sure of before anything is measured.

    Raises:
        ConfigError: this version has no evaluation, or the file is not there.
    """
    if not data.is_file():
        raise ConfigError("no such file", seen=str(data), field="data")
    return TextQuality(str(data), limit)
