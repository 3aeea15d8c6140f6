"""What a sweep measures the quality of a precision with.

Owns the way from a sweep to ``ingot eval``'s perplexity: a sweep knows no metric, and an evaluation no sweep.

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
    from ingot.bench.side import SideSpec

_METRIC = "perplexity"


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
        from ingot.evaluate.data import read_data
        from ingot.evaluate.perplexity import perplexity
        from ingot.evaluate.side import SideSpec

        if spec.path is None:
            raise ConfigError(
                "random weights have no quality to measure", seen="--data", flag="--data: leave it out"
            )
        items = read_data(Path(self.data), limit=self.limit)
        names = ("path", "kind", "device", "dtype", "quant", "kv_dtype")
        one = SideSpec(**{name: getattr(spec, name) for name in names})
        found = perplexity(one, None, items, ())
        metrics = found.record["sides"][0]["metrics"]
        return {_METRIC: metrics[_METRIC]}

    def to_json(self) -> dict[str, Any]:
        """For the record: metric, file and its hash, items taken at most."""
        digest = hashlib.sha256(Path(self.data).read_bytes()).hexdigest()[:16]
        return {"metric": _METRIC, "file": self.data, "sha256": digest, "limit": self.limit}


def text_quality(data: Path, limit: int | None) -> TextQuality:
    """The quality on a file, made sure of before anything is measured.

    Raises:
        ConfigError: this version has no evaluation, or the file is not there.
    """
    if not data.is_file():
        raise ConfigError("no such file", seen=str(data), flag="--data")
    return TextQuality(str(data), limit)
