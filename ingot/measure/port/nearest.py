"""The registered architecture that is nearest to a checkpoint of another one.

comparisons = compare(checkpoint.config, patterns)    # the nearest first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.config.json_config import JsonConfig
from ingot.errors import CheckpointError, IngotError
from ingot.measure.port.config_reading import ConfigReading, read_with
from ingot.measure.port.tensor_matching import TensorMatching, match_tensors
from ingot.measure.port.tensor_patterns import TensorPattern
from ingot.models.architecture import Architecture
from ingot.models.model_registry import ARCHITECTURES


@dataclass(frozen=True)
class ConfigComparison(JsonConfig):
    """A checkpoint beside one architecture.

    Attributes:
        score: mean of the shares of tensors and of keys, 0 to 1.
        tensors: None: the architecture makes nothing of the config, so there are no rules.
    """

    architecture: str
    score: float
    reading: ConfigReading
    tensors: TensorMatching | None

    @property
    def why(self) -> str:
        """What the score counts."""
        taken = len(self.reading.reads) - len({r.key.partition(".")[0] for r in self.reading.refused})
        others = len(self.reading.unknown) + len(self.reading.renamed) + len(self.reading.refused)
        keys = f"{taken} of {taken + others} config keys that may change logits"
        if self.tensors is None:
            return f"no tensors, {keys}"
        lacking = len(self.tensors.without_tensor)
        rules = f" ({lacking} of its rules without a tensor)" if lacking else ""
        return f"{self.tensors.matched} of {len(self.tensors.tensors)} tensor patterns{rules}, {keys}"


def compare(hf: Mapping[str, Any], patterns: Sequence[TensorPattern]) -> list[ConfigComparison]:
    """Every registered text decoder beside a checkpoint, the nearest first.

    Raises:
        CheckpointError: nothing of the checkpoint is like any of them.
    """
    found = [one for a in ARCHITECTURES if a.encoder is None for one in (_compared(a, hf, patterns),)]
    found.sort(key=lambda one: (-one.score, one.architecture))
    if not found or not found[0].score:
        raise CheckpointError(
            "no registered architecture shares a config key or a tensor name with this checkpoint",
            seen=", ".join(list(map(str, hf))[:8]) or "an empty config.json",
            allowed=", ".join(one.architecture for one in found),
            fix="check that config.json describes a language model; else start from docs/adding-a-model.md",
        )
    return found


def _compared(
    architecture: Architecture, hf: Mapping[str, Any], patterns: Sequence[TensorPattern]
) -> ConfigComparison:
    reading = read_with(architecture, hf)
    tensors = None
    if reading.config is not None:
        try:
            tensors = match_tensors(architecture, reading.config, patterns)
        except (IngotError, ValueError, TypeError, LookupError):  # of a config that no model has
            tensors = None
    share = 0.0 if tensors is None else tensors.share
    return ConfigComparison(architecture.name, round((share + reading.known_share) / 2, 3), reading, tensors)
