"""A kernel plan whose tiles can change between two runs of a model, and that notes all lookups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from ingot.config.kernel_plan import KernelPlan, TileTable, plan_key, row_bucket


class PlanPlace(NamedTuple):
    """Where a plan holds a choice: an op and its key."""

    op: str
    key: str


Asked = tuple[Mapping[str, int], int]  # a shape, and the number of rows
_IN_USE: ContextVar[Mapping[PlanPlace, Mapping[str, int]]] = ContextVar("tiles", default={})  # noqa: B039


@contextmanager
def using(tiles: Mapping[PlanPlace, Mapping[str, int]]) -> Iterator[None]:
    """Models on trial take these tiles, and elsewhere their defaults, in this thread."""
    token = _IN_USE.set(tiles)
    try:
        yield
    finally:
        _IN_USE.reset(token)


@dataclass(frozen=True)
class TrialPlan(KernelPlan):
    """The plan of a model on trial; ``asked``: every place that was looked up, in order."""

    asked: dict[PlanPlace, Asked] = field(default_factory=dict)

    def table(self, op: str, **shape: int) -> TileTable:
        """Lookups that are noted, and answered by the tiles in use."""
        return _TrialTable(self.asked, op, shape)


class _TrialTable(TileTable):
    __slots__ = ("_asked", "_op", "_shape")

    def __init__(self, asked: dict[PlanPlace, Asked], op: str, shape: Mapping[str, int]) -> None:
        self._asked, self._op, self._shape = asked, op, shape

    def at(self, rows: int, over: Mapping[str, int] | None = None) -> dict[str, int] | None:
        place = PlanPlace(self._op, plan_key(self._op, rows, self._shape))
        self._asked.setdefault(place, (self._shape, rows))
        tiles = _IN_USE.get().get(place)
        return TileTable({} if tiles is None else {row_bucket(rows): tiles}).at(rows, over)
