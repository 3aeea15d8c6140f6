"""How many tokens and layers of a long prompt's chunk fit into a share of a decode step's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ingot.config.step_sizes import LAYERED_TOKENS

_TURN = 8  # measurements until a welcome one counts


def cautious(before: float | None, now: float, *, unwelcome: Callable[[float, float], float]) -> float:
    """An estimate after one more measurement: an unwelcome one (the ``max`` or ``min`` of two) counts at
    once, a welcome one, which may be chance, little by little.
    """
    return now if before is None else unwelcome(now, before + (now - before) / _TURN)


class Pace:
    """One chunk after another, of one prompt or another; there is one at a time. A step runs at least one
    layer.

    Attributes:
        sizes: tokens that a chunk may be padded to, ascending.
    """

    def __init__(self, share: float, num_layers: int, sizes: Sequence[int] = LAYERED_TOKENS) -> None:
        self.share = share
        self.num_layers = num_layers
        self.sizes = sizes
        self._rows = sizes[len(sizes) // 2]  # of the current chunk, or of the last one
        self._step_ms: float | None = None
        self._layer_ms: float | None = None  # at so many rows

    def size_of(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def chunk(self, left: int) -> int:
        """Tokens of the next chunk of a prompt with so many left: one size less than before if a layer of it
        took more than the share, one more if a layer of that should fit.
        """
        at, room = self.sizes.index(self._rows), self._room
        if room is not None and self._layer_ms is not None:
            if self._layer_ms > room:
                at = max(at - 1, 0)
            elif at + 1 < len(self.sizes) and self._layer_ms * self.sizes[at + 1] / self._rows <= room:
                at += 1
        count = min(self.sizes[at], left)
        rows = self.size_of(count)
        if self._layer_ms is not None:  # fewer rows may take as long, more take longer by as many at most
            self._layer_ms *= max(rows / self._rows, 1.0)
        self._rows = rows
        return count

    def last(self, first: int) -> int:
        """The end of a step's layers from ``first`` on: one layer, until times are known."""
        room = self._room
        fitting = 1 if room is None or self._layer_ms is None else int(room / self._layer_ms)
        return min(first + max(fitting, 1), self.num_layers)

    def measured(self, rows: int, layers: int, layers_ms: float, step_ms: float | None) -> None:
        """Add times of layers of a chunk, and of the step before them; None: it did more than decode."""
        if step_ms is not None:
            self._step_ms = cautious(self._step_ms, step_ms, unwelcome=min)
        if rows == self._rows:  # else of the chunk before
            self._layer_ms = cautious(self._layer_ms, layers_ms / layers, unwelcome=max)

    @property
    def _room(self) -> float | None:
        return None if self._step_ms is None else self.share * self._step_ms
