"""Results of comparing an engine with its checkpoint: figures for proof.json, and tensors that differ."""

from __future__ import annotations

from dataclasses import dataclass, field

from ingot.config.json_config import JsonConfig

_DIGITS = 3


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
    """

    tensors: int
    kinds: tuple[KindFigures, ...]
    unknown: bool = False

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
                {measure: float(f"{share:.{_DIGITS}g}") for measure, (share, _) in worst.items()},
                {measure: name for measure, (share, name) in worst.items() if share > 0},
            )
            for kind, worst in self._kinds.items()
        )
        return SourceFigures(self.tensors, kinds, unknown)
