"""How far rounding may move the values of a weight, and which values moved farther.

Owns the bounds of weights in fewer bits beside what they were made of. Knows no layout, no file and no way
of choosing quantized values.

    moves = Moves(chosen=False, least=2**-11)
    limit = moves.limit(float(moves.by_row(expected, got).median()))
    moves.wrong(expected, got, limit)                  # bool [N, K]

Rounding moves a value by half a scale at most. GPTQ has no such bound: a column of small inputs that others
explain makes up for their errors, in all rows, and a value of it may end anywhere on its grid. But what such
a column takes over has nothing to do with its own weights. So a value is held to how far its column moves,
and a column that moves far must still hold its own weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.quant.rounding import CLIP_RATIOS

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
        times, most = (_CHOSEN_TIMES, _CLIPPED + self.farther) if self.chosen else (_TIMES, FAR)
        return min(most, times * max(median, self.least))

    def by_row(self, expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """How far each row [N] of a weight [N, K] moved; of chosen values in measures of their columns."""
        return self._by_row(_shares(expected, got)[0])

    def wrong(self, expected: torch.Tensor, got: torch.Tensor, limit: float) -> torch.Tensor:
        """bool [N, K]: whole rows, and of chosen values columns, beyond ``limit``."""
        shares, weights = _shares(expected, got)
        rows = ~(self._by_row(shares) <= limit)
        if not self.chosen:
            return rows[:, None].expand_as(expected)
        rows |= _lost(shares, weights, 1) > limit
        columns = (_carried(shares) > _TIMES) & (_lost(shares, weights, 0) > limit)
        return rows[:, None] | columns

    def _by_row(self, shares: torch.Tensor) -> torch.Tensor:
        carried = _carried(shares).clamp(min=1) if self.chosen else 1
        return (shares.abs() / carried).amax(1)


def _shares(expected: torch.Tensor, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The differences, and what is expected, as shares of the largest value of their row: [rows, columns]."""
    largest = expected.abs().amax(1, keepdim=True).clamp(min=TINY)
    return (got - expected) / largest, expected / largest


def _carried(shares: torch.Tensor) -> torch.Tensor:
    """How many times as far as the median column each column moves, by the median of its rows: [columns].
    Columns that are kept exactly, as of zeros, do not count.
    """
    medians = shares.abs().median(0).values
    some = medians[medians > 0]
    return medians / some.median() if some.numel() else torch.zeros_like(medians)


def _lost(shares: torch.Tensor, weights: torch.Tensor, dim: int) -> torch.Tensor:
    """What share of its weights a row or a column lost or gained: 0 where the difference has nothing to do
    with them, 1 where nothing of them is left.
    """
    return ((shares * weights).sum(dim) / weights.square().sum(dim).clamp(min=TINY)).abs()
