"""How far rounding may move the values of a weight, and which values moved farther.

Rounding moves a value by half a scale at most. GPTQ has no such bound. It rounds w + p, where p makes up for
the errors of the columns before. What a column takes over of them has nothing to do with its own weights, and
it is as much in all rows: a value is held to how far its column moves, and a column that moves far must still
hold its own weights.

Errors are half a scale at most, unless a value is cut to an end of its grid. Then the rest of p, which has no
bound, is an error, too, and the other columns of that row make up for it. So

- a value at an end of its grid says only that w + p lies there or beyond: for a weight within the grid it has
  moved by the length of the grid at most, and that is its bound (``clipped``, where the grid is known);
- a row of 4 bits has as much more room as its less moved half moves farther than that of other rows, so that
  wrong values in some columns do not excuse themselves;
- a row must still hold its own weights, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.quant.methods.rounding import CLIP_RATIOS

_TIMES = 4.0  # rounding to fewer bits moves no row this many times as far as it moves the median row ...
_CHOSEN_TIMES = 8.0  # (values that samples choose make up for one another's errors)
FAR = 0.5  # ... and none by half of its largest value
# Chosen ranges of 4 bits may be clipped: so far inside ends the shortest, half a scale (of 15 over 2) off.
_CLIPPED = 1 - CLIP_RATIOS[-1] * 14 / 15
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Moves:
    """The bounds of one kind of weights.

    Attributes:
        chosen: whether samples chose the quantized values.
        least: what the dtypes alone may move a value by, as a share of its row's largest.
        farther: share of a row's largest by which chosen values may lie beyond the ends of a clipped range.
    """

    chosen: bool
    least: float
    farther: float = 0.0

    def limit(self, median: float) -> float:
        """How far a row may move, where a median row moves by ``median``: a share of its largest value."""
        return min(self._most, self._times * max(median, self.least))

    @property
    def _times(self) -> float:
        return _CHOSEN_TIMES if self.chosen else _TIMES

    @property
    def _most(self) -> float:
        return _CLIPPED + self.farther if self.chosen else FAR

    def by_row(
        self, expected: torch.Tensor, got: torch.Tensor, clipped: torch.Tensor | None = None
    ) -> torch.Tensor:
        """How far each row [N] of a weight [N, K] moved; of chosen values in measures of columns and rows.

        ``clipped`` bool [N, K]: chosen values that only their grid bounds; None: no grid is known.
        """
        return self._by_row(_shares(expected, got)[0], clipped)

    def wrong(
        self, expected: torch.Tensor, got: torch.Tensor, limit: float, clipped: torch.Tensor | None = None
    ) -> torch.Tensor:
        """bool [N, K]: whole rows, and of chosen values columns, beyond ``limit``; ``clipped`` as above."""
        shares, weights = _shares(expected, got)
        rows = ~(self._by_row(shares, clipped) <= limit)
        if not self.chosen:
            return rows[:, None].expand_as(expected)
        rows |= _lost(shares, weights, 1) > limit
        columns = (_carried(shares) > _TIMES) & (_lost(shares, weights, 0) > limit)
        return rows[:, None] | columns

    def _by_row(self, shares: torch.Tensor, clipped: torch.Tensor | None) -> torch.Tensor:
        if not self.chosen:
            return shares.abs().amax(1)
        moved = shares.abs() / _carried(shares).clamp(min=1)
        farthest = (moved if clipped is None else moved.masked_fill(clipped, 0)).amax(1)
        room = self._times * max(float(farthest.nanmedian()), self.least) / self._most
        return farthest / _made_up(moved).clamp(min=1, max=max(room, 1.0))


def _shares(expected: torch.Tensor, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The differences, and what is expected, as shares of the largest value of their row: [rows, columns]."""
    largest = expected.abs().amax(1, keepdim=True).clamp(min=TINY)
    return (got - expected) / largest, expected / largest


def _made_up(moved: torch.Tensor) -> torch.Tensor:
    """How many times as far as that of the median row the less moved half of each row moves, by its median
    and less two of that one's standard errors: [rows].
    """
    columns = moved.shape[1]
    quiet = moved.kthvalue(max(1, columns // 4), dim=1).values
    return _by_median(quiet) / (1 + 2 * (3 / columns) ** 0.5)  # of evenly spread moves


def _by_median(values: torch.Tensor) -> torch.Tensor:
    """Values in parts of the median one that is not 0."""
    some = values[values > 0]
    return values / some.median() if some.numel() else torch.zeros_like(values)


def _carried(shares: torch.Tensor) -> torch.Tensor:
    """How many times as far as the median column each column moves, by the median of its rows: [columns].
    Columns that are kept exactly, as of zeros, do not count.
    """
    return _by_median(shares.abs().median(0).values)


def _lost(shares: torch.Tensor, weights: torch.Tensor, dim: int) -> torch.Tensor:
    """The share of its weights that a row or a column lost or gained: 1 where nothing of them is left."""
    return ((shares * weights).sum(dim) / weights.square().sum(dim).clamp(min=TINY)).abs()
