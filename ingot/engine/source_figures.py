"""Results of comparing an engine with its checkpoint: figures for proof.json, and tensors that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ingot.config.json_config import JsonConfig

_DIGITS = 3
_SHOWN = 3  # layers in a line


@dataclass(frozen=True)
class KindFigures(JsonConfig):
    """All tensors of one kind.

    Attributes:
        kind: ``copied``, or a scheme and a method: ``w4a16 gptq``.
        worst: by measure (limits.py), the largest deviation in parts of its limit.
        at: by measure, the tensor with the worst.
    """

    kind: str
    tensors: int
    worst: dict[str, float]
    at: dict[str, str]


@dataclass(frozen=True)
class SourceFigures(JsonConfig):
    """Every stored tensor compared with the checkpoint.

    Attributes:
        unknown: the architecture's published names are not listed, so its own weight map was used.
        errors: by linear layer in fewer bits ‖stored - W‖ / ‖W‖ (Frobenius norms), W being the checkpoint's
            weight after the method's rotation, order or factors; {} where the checkpoint came quantized.
    """

    tensors: int
    kinds: tuple[KindFigures, ...]
    unknown: bool = False
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest deviation of all, in parts of its limit."""
        return max((value for kind in self.kinds for value in kind.worst.values()), default=0.0)


@dataclass(frozen=True)
class SourceDifference:
    """A tensor that differs from its source: by which measure, how many times its limit, and where."""

    name: str
    measure: str
    share: float
    where: str

    @property
    def text(self) -> str:
        if self.measure == "copied":
            return f"{self.name}: {self.where}"
        return f"{self.name}: {self.measure} off by {self.share:.3g} times its limit, {self.where}"


@dataclass
class Gathered:
    """Figures by kind, as they come."""

    tensors: int = 0
    differences: list[SourceDifference] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    _kinds: dict[str, dict[str, tuple[float, str]]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, name: str, shares: dict[str, float]) -> None:
        """One tensor's largest deviations by measure."""
        self.tensors += 1
        self._counts[kind] = self._counts.get(kind, 0) + 1
        worst = self._kinds.setdefault(kind, {})
        for measure, share in shares.items():
            if measure not in worst or share > worst[measure][0]:
                worst[measure] = share, name

    def figures(self, *, unknown: bool) -> SourceFigures:
        """All of them, rounded to three significant digits."""
        kinds = tuple(
            KindFigures(
                kind,
                self._counts[kind],
                {measure: _rounded(share) for measure, (share, _) in worst.items()},
                {measure: name for measure, (share, name) in worst.items() if share > 0},
            )
            for kind, worst in self._kinds.items()
        )
        errors = {name: _rounded(error) for name, error in self.errors.items()}
        return SourceFigures(self.tensors, kinds, unknown, errors)


def errors_text(errors: Mapping[str, float]) -> str:
    """For people: the mean of layers' errors, and the largest ones with their layers."""
    worst = sorted(errors, key=lambda name: -errors[name])[:_SHOWN]
    mean = sum(errors.values()) / len(errors)
    named = ", ".join(f"{name} {percent(errors[name])}" for name in worst)
    return f"mean {percent(mean)} of {len(errors)} layers; most {named}"


def percent(error: float) -> str:
    """Three digits: 9.13 %."""
    return f"{100 * error:.3g} %"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
