"""The quality that a sweep measures beside speed, by the metrics of ``ingot eval``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.measure.evaluate.data_file import DataFile
    from ingot.measure.side.side_spec import SideSpec


@dataclass(frozen=True)
class DataQuality:
    """Perplexity on the first ``limit`` items of a file (None: all); of a speech model, WER in percent of
    greedy transcripts of recordings.
    """

    data: str
    limit: int | None = None
    speech: bool = False

    def __call__(self, spec: SideSpec) -> dict[str, float]:
        """The metric by its name; {} where the transcripts have no words."""
        from ingot.measure.evaluate.perplexity import perplexity
        from ingot.measure.evaluate.scored_transcripts import WerSettings, wer
        from ingot.measure.side.side_spec import SideSpec

        if spec.path is None:
            raise ConfigError(
                "random weights have no quality to measure",
                seen="--data",
                field="data",
                fix="--data: leave it out",
            )
        names = ("path", "kind", "device", "dtype", "quant", "kv_dtype")
        side = SideSpec(**{name: getattr(spec, name) for name in names})
        if self.speech:
            found = wer(side, None, self._items(), (), WerSettings())
        else:
            found = perplexity(side, None, self._items(), ())
        value = found.record["sides"][0]["metrics"][self._metric]
        return {} if value is None else {self._metric: value}

    def to_json(self) -> dict[str, Any]:
        """For the record: metric, file and its hash, and the limit."""
        if self.speech:
            digest = self._items().facts()["sha256"]
        elif Path(self.data).is_file():
            digest = hashlib.sha256(Path(self.data).read_bytes()).hexdigest()
        else:
            raise ConfigError("no such file", seen=self.data, field="data")
        return {"metric": self._metric, "file": self.data, "sha256": digest[:16], "limit": self.limit}

    @property
    def _metric(self) -> str:
        return "wer" if self.speech else "perplexity"

    def _items(self) -> DataFile:
        from ingot.measure.evaluate.data_file import read_data
        from ingot.measure.evaluate.scored_transcripts import recording_check

        path = Path(self.data)
        if not self.speech:
            return read_data(path, limit=self.limit)
        return read_data(
            path, limit=self.limit, needs=recording_check(path if path.is_dir() else path.parent)
        )
