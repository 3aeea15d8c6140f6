"""Lines of points in two dimensions, laid out so that every drawing of them is the same.

Owns scales, ticks and where labels go without touching one another. Knows no file format and no measurement.

    frame = Frame.of(panel, 420, 320)
    frame.place(mark.x, mark.y)             # pixels from the left and from the bottom
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C564B")
OTHER_COLOR, FRONT_COLOR = "#444444", "#B0B0B0"
ON_DARK = {  # the same hues, as light as a dark page needs
    "#0072B2": "#4BA9E8",
    "#D55E00": "#FF8A3D",
    "#009E73": "#2FCB9B",
    "#CC79A7": "#E09CC3",
    "#E69F00": "#F2B632",
    "#56B4E9": "#8FD0F5",
    "#7A5195": "#B78FD6",
    "#8C564B": "#C98F82",
    "#444444": "#C8C8C8",
    "#B0B0B0": "#5A5F66",
}
LABEL_SIZE, MARK_SIZE = 10.0, 4.0  # pixels: height of a label's letters, radius of a mark
_LETTER = 0.7  # width of a letter over its height
_PIECE, _THIN = 4.0, 1.5  # of a line: how far apart its pieces are, and half their width
_PAD = 0.09  # of the range, at either end
_LOG_FROM = 6.0  # largest over least value
_MOST_TICKS = 7
_STEPS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))


@dataclass(frozen=True)
class Mark:
    """A point, what stands beside it, and what is told of it."""

    x: float
    y: float
    label: str
    told: str


@dataclass(frozen=True)
class Series:
    """Points of one kind, joined in their order; ``dashed`` for the side that is compared with."""

    name: str
    color: str
    marks: tuple[Mark, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``front`` is the Pareto line's points, if this panel has it."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    front: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Scale:
    """From values to shares of an axis, 0 at its beginning and 1 at its end."""

    low: float
    high: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        """Around all values, logarithmic where they span enough."""
        low, high = min(values), max(values)
        if low > 0 and high / low >= _LOG_FROM:
            pad = (high / low) ** _PAD
            return cls(low / pad, high * pad, True)
        pad = (high - low) * _PAD or abs(high) * _PAD or 1.0
        return cls(low - pad, high + pad, False)

    def at(self, value: float) -> float:
        """Where a value lies."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values, ``_MOST_TICKS`` at most."""
        if not self.log:
            return _even(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in _STEPS:
            values = [step * 10.0**decade for decade in decades for step in steps]
            inside = [value for value in values if self.low <= value <= self.high]
            if len(inside) <= _MOST_TICKS:
                return inside
        return inside


@dataclass(frozen=True)
class Label:
    """A text whose box begins at (x, y), pixels from the left and from the bottom."""

    text: str
    x: float
    y: float
    color: str


@dataclass(frozen=True)
class Frame:
    """A panel on axes of so many pixels."""

    panel: Panel
    width: float
    height: float
    x: Scale
    y: Scale

    @classmethod
    def of(cls, panel: Panel, width: float, height: float) -> Self:
        """Axes around all of the panel's points, of which there is at least one."""
        marks = [mark for series in panel.series for mark in series.marks]
        x = Scale.over([mark.x for mark in marks])
        return cls(panel, width, height, x, Scale.over([mark.y for mark in marks]))

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Pixels from the left and from the bottom."""
        return self.x.at(x) * self.width, self.y.at(y) * self.height

    def labels(self) -> list[Label]:
        """A label for each mark that has room for one; none touches another, or a mark, and none a line
        where there is another place.
        """
        places = [self.place(m.x, m.y) for series in self.panel.series for m in series.marks]
        taken = [_Box(x - MARK_SIZE, y - MARK_SIZE, 2 * MARK_SIZE, 2 * MARK_SIZE) for x, y in places]
        lines = self._lines()
        found = []
        for series in self.panel.series:
            for mark in series.marks:
                box = self._free(mark, [*taken, *lines]) or self._free(mark, taken)
                if box is not None:
                    taken.append(box)
                    found.append(Label(mark.label, box.x, box.y, series.color))
        return found

    def _lines(self) -> list[_Box]:
        """What the lines between marks cover, in small pieces."""
        paths = [[(m.x, m.y) for m in series.marks] for series in self.panel.series]
        return [
            piece
            for path in [*paths, list(self.panel.front)]
            for a, b in pairwise(self.place(*point) for point in path)
            for piece in _pieces(a, b)
        ]

    def _free(self, mark: Mark, taken: Sequence[_Box]) -> _Box | None:
        """The first box around a mark that touches nothing."""
        x, y = self.place(mark.x, mark.y)
        width = len(mark.label) * LABEL_SIZE * _LETTER
        whole = _Box(0, 0, self.width, self.height)
        for box in _around(x, y, width, LABEL_SIZE):
            if box.inside(whole) and not any(box.touches(other) for other in taken):
                return box
        return None


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float

    def touches(self, other: _Box) -> bool:
        apart_x = self.x + self.width <= other.x or other.x + other.width <= self.x
        apart_y = self.y + self.height <= other.y or other.y + other.height <= self.y
        return not (apart_x or apart_y)

    def inside(self, other: _Box) -> bool:
        end_x, end_y = self.x + self.width, self.y + self.height
        across = other.x <= self.x and end_x <= other.x + other.width
        return across and other.y <= self.y and end_y <= other.y + other.height


def tick_texts(values: Sequence[float]) -> list[str]:
    """20000 → 20,000; 0.5 → 0.5; with as many digits as tell all values apart."""
    for digits in range(4, 17):
        texts = [_tick_text(value, digits) for value in values]
        if len(set(texts)) == len(values):
            break
    return texts


def _tick_text(value: float, digits: int) -> str:
    if value < 1000:
        return f"{value:.{digits}g}"
    places = max(0, digits - len(f"{value:.0f}"))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


def _around(x: float, y: float, width: float, height: float) -> Iterable[_Box]:
    """Boxes around a point: near it first, above before beside before below."""
    for gap in (MARK_SIZE + 2, MARK_SIZE + 9):
        left, middle, right = x - gap - width, x - width / 2, x + gap
        below, level, above = y - gap - height, y - height / 2, y + gap
        for at in ((middle, above), (left, above), (right, level), (middle, below), (right, below)):
            yield _Box(*at, width, height)
        for at in ((left, level), (right, above), (left, below)):
            yield _Box(*at, width, height)


def _pieces(a: tuple[float, float], b: tuple[float, float]) -> Iterable[_Box]:
    """Boxes along a line, a few pixels apart."""
    steps = max(1, round(math.dist(a, b) / _PIECE))
    for i in range(steps + 1):
        x, y = (p + (q - p) * i / steps for p, q in zip(a, b, strict=True))
        yield _Box(x - _THIN, y - _THIN, 2 * _THIN, 2 * _THIN)


def _even(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / (_MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * s for s in (1, 2, 5, 10) if power * s >= rough)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
