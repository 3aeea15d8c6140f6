"""RPTQ's ranges: scales and zeros for blocks of reordered channels, and weights in 4 bits within 8.

x ≈ (q - zero) · scale, with q in -2^(bits-1) … 2^(bits-1) - 1, whole zeros, and scale and zero of a block.

Source: Yuan et al., "RPTQ" (arXiv 2304.01089) and its code: a scale and a zero for each cluster of channels.
That code computes in floating point; a scale along the sum cannot leave an integer product. So the
order is cut into blocks, as wide as a step of the product's loop. A cluster is a run of whole blocks, and
each of them has the scale of its own channels, which is at most the cluster's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.quant.methods.rounding import Grid, in_groups, weighed
from ingot.quant.plain_rows import rounded_blocks

KEPT = 0.99  # of an average that the next record moves
_LEAST_SCALE = 1e-10
_RATIOS = tuple(1 - step / 20 for step in range(19))  # 1, 0.95 … 0.1
_LEAST_SHARE = 2.0**-16  # of a block's largest magnitude: its least scale, so that zeros stay below 2^16
MOST_FACTOR = 15  # of a group in 4 bits: -8 · 15 fits 8 bits
_MIDDLE = 8


def averaged_ranges(
    lowest: torch.Tensor, highest: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lowest, highest) [blocks] of records [R, K] by a moving average, as the paper's code has it: the first
    record's, then 0.99 of what was and 0.01 of each next one's.
    """
    low = torch.stack([part.amin(1) for part in lowest.split(list(lengths), dim=1)], 1)  # [R, blocks]
    high = torch.stack([part.amax(1) for part in highest.split(list(lengths), dim=1)], 1)
    averaged = torch.stack([low[0], high[0]])
    for own in torch.stack([low, high], 1)[1:]:
        averaged = averaged * KEPT + own * (1 - KEPT)
    return averaged[0], averaged[1]


def scales_of(low: torch.Tensor, high: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zeros) fp32 of ranges; the paper's code: scale = (high - low) / 2^bits, and
    zero = round(-(high + low) / (2 · scale)), so that the middle of the range is value 0.
    """
    low, high = low.double(), high.double()
    least = (torch.maximum(high.abs(), low.abs()) * _LEAST_SHARE).clamp(min=_LEAST_SCALE)
    scales = torch.maximum((high - low) / (1 << bits), least).float()
    return scales, (-(high + low) / (2 * scales.double())).round().float()


def narrowed(
    low: torch.Tensor, high: torch.Tensor, x: torch.Tensor, block: int, bits: int, importance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranges [blocks] shrunk so that a sample x [T, K] of the ordered input costs least: in few bits a rare
    large value is cheaper cut than kept.

    ``importance`` [K] weighs the columns' squared errors: Σ W² of a column is what it does to the outputs.
    """
    best, least = torch.ones_like(low), torch.full_like(low, torch.inf)
    for ratio in _RATIOS:
        scales, zeros = scales_of(low * ratio, high * ratio, bits)
        error = (rounded_blocks(x, scales, zeros, block, bits) - x).square().mean(0) * importance
        found = torch.stack([part.sum() for part in error.split(block)])
        best = torch.where(found < least, ratio, best)
        least = torch.minimum(found, least)
    return low * best, high * best


@dataclass(frozen=True, slots=True)
class TwoLevelWeights:
    """Scales of weights [N, K] in 4 bits that are whole multiples of one scale per row.

    Attributes:
        grid: values 0 … 15 around 8, scales [N, groups].
        factors: int8 [N, groups], -15 … 15; rows: fp32 [N]. A scale is their product.
    """

    grid: Grid
    factors: torch.Tensor
    rows: torch.Tensor

    def nearest(self, weight: torch.Tensor, group: int) -> torch.Tensor:
        """The values uint8 [N, K] of the grid that are nearest to a weight [N, K]."""
        values = self.grid.nearest(in_groups(weight.float(), group))
        return values.flatten(1)[:, : weight.shape[1]].to(torch.uint8)

    def wide_values(self, values: torch.Tensor, group: int) -> torch.Tensor:
        """Values [N, K] of the grid as int8 values whose scale is the row's: (q - 8) · factor."""
        factors = self.factors.repeat_interleave(group, dim=1)[:, : values.shape[1]]
        return (values.to(torch.int16) - _MIDDLE).mul_(factors).to(torch.int8)


def two_levels(weight: torch.Tensor, group: int, importance: torch.Tensor) -> TwoLevelWeights:
    """The scales of a weight [N, K] whose columns count ``importance`` [K] times.

    A group's factor is the one of 15 magnitudes that costs least, with the sign that gives the end of the
    grid the value of largest magnitude (rounding.py, 4 bits, symmetric). So (q - 8) · factor is a value of
    8 bits, and the row's scale is all that is left to multiply by: QServe's two levels (arXiv 2405.04532).
    """
    blocks, cost = in_groups(weight.float(), group), weighed(importance.float(), group)
    largest, smallest = blocks.amax(-1), blocks.amin(-1)
    peak = torch.maximum(largest, -smallest)
    rows = peak.amax(1, keepdim=True) / (_MIDDLE * MOST_FACTOR)
    rows = torch.where(rows == 0, torch.ones_like(rows), rows)  # [N, 1]
    sign = torch.where(largest > -smallest, -1.0, 1.0).to(peak)
    zeros = torch.full_like(peak, _MIDDLE)
    best, least = sign, torch.full_like(peak, torch.inf)
    for factor in range(1, MOST_FACTOR + 1):
        grid = Grid(sign * factor * rows, zeros, 0, 15)
        error = cost(grid.meant(grid.nearest(blocks)) - blocks)
        best = torch.where(error < least, sign * factor, best)
        least = torch.minimum(error, least)
    return TwoLevelWeights(Grid(best * rows, zeros, 0, 15), best.to(torch.int8), rows[:, 0])
