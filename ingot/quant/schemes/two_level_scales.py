"""Weights rounded to 4 bits inside values of 8: a scale per row, and a whole inner scale per group.

W ≈ unit · (q - zero) · inner with q in 0 … 15. The unit, fp32, is max|w| / 119 of a row; the inner scale, 1
to 16, and the zero are integers, per group of columns. The two levels, and the 119, are QServe's (arXiv
2405.04532): the widest range is then 238 units, 16 times 16 hold it with half an inner scale to spare, and no
value leaves int8. Here that holds for *all* 16 values of a group, not only for those nearest to a weight, so
that GPTQ may take any: a zero lies between 15 - ⌊127 / inner⌋ and ⌊128 / inner⌋.

QServe rounds to 8 bits first and those to 4. Values here are the nearest to the weight itself, and an inner
scale is the one of least squared error among those of a range that is cut by up to three.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.errors import BuildError
from ingot.kernels.weight.int4_weight import MOST_NUMBER, MOST_STEP
from ingot.quant.methods.rounding import Grid, as_quantized, check, in_groups, weighed
from ingot.quant.quantized_values import Quantized

MOST = 119  # units of a row's largest magnitude
_CUTS = 4  # inner scales that are tried: the whole range's, and less by 1 … 3
_PIECE = 1 << 22  # weights that are widened at once


@dataclass(frozen=True, slots=True)
class TwoLevelScales:
    """Scales and zeros of a weight [N, K].

    Attributes:
        units: fp32 [N].
        inner, zeros: fp32 [N, groups], integers.
    """

    units: torch.Tensor
    inner: torch.Tensor
    zeros: torch.Tensor

    def grid(self) -> Grid:
        """What the values of each group stand for."""
        return Grid(self.units[:, None] * self.inner, self.zeros, 0, MOST_NUMBER)

    def quantized(self, values: torch.Tensor, group: int) -> Quantized:
        """Values uint8 [N, K] of ``grid`` as a whole."""
        grid = self.grid()
        found = as_quantized(values, grid.scales, grid.zeros, 4, group, False, torch.float32)
        return Quantized(found.values, found.scales, found.zeros, 4, group, units=self.units)


def quantize_two_level(weight: torch.Tensor, group: int) -> Quantized:
    """Every weight [N, K] to its nearest value; errors as of ``quantize``."""
    check(weight, 4, group)
    levels = two_levels(weight, group)
    values = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    grid = levels.grid()
    for rows in _pieces(weight):
        part = Grid(grid.scales[rows], grid.zeros[rows], grid.low, grid.high)
        found = part.nearest(in_groups(weight[rows].float(), group)).flatten(1)
        values[rows] = found[:, : weight.shape[1]].to(torch.uint8)
    return levels.quantized(values, group)


def two_levels(weight: torch.Tensor, group: int, importance: torch.Tensor | None = None) -> TwoLevelScales:
    """Units, inner scales and zeros of a weight [N, K].

    ``importance`` [K] weighs the columns' squared errors: mean x² of each input. Raises BuildError where a
    row's largest magnitude is too small to be divided by 119 in fp32.
    """
    cost = weighed(importance, group)
    found = []
    for own in _pieces(weight):
        wide = weight[own].float()
        peak = wide.abs().amax(1)
        units = torch.where(peak > 0, peak / MOST, torch.ones_like(peak))
        if bool((units < torch.finfo(torch.float32).tiny).any()):
            raise BuildError("a row's weights are too small for a scale", seen=f"{float(peak.min()):.3g}")
        blocks = in_groups(wide / units[:, None], group)  # in units: -119 … 119
        low, high = blocks.amin(-1).clamp_(max=0), blocks.amax(-1).clamp_(min=0)
        whole = ((high - low) / MOST_NUMBER).ceil().clamp_(1, MOST_STEP)
        inner, zeros = whole, _zeros(low, high, whole)
        least = torch.full_like(whole, torch.inf)
        for cut in range(_CUTS):
            tried = (whole - cut).clamp_(min=1)
            grid = Grid(tried, _zeros(low, high, tried), 0, MOST_NUMBER)
            error = cost(grid.meant(grid.nearest(blocks)) - blocks)
            better = error < least
            inner, zeros = torch.where(better, tried, inner), torch.where(better, grid.zeros, zeros)
            least = torch.minimum(error, least)
        found.append((units, inner, zeros))
    return TwoLevelScales(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def inner_scales(found: Quantized) -> torch.Tensor:
    """uint8 [groups, N]: how many units a scale of ``TwoLevelScales.quantized`` is."""
    assert found.units is not None
    return (found.scales / found.units).round().to(torch.uint8)


def _zeros(low: torch.Tensor, high: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """The zero that puts 16 values in the middle of a range, where all are of int8."""
    middle = MOST_NUMBER / 2 - (low + high) / 2 / inner
    least = (MOST_NUMBER - (127 / inner).floor()).clamp_(min=0)
    most = (128 / inner).floor().clamp_(max=MOST_NUMBER)
    return torch.minimum(torch.maximum(middle.round(), least), most)


def _pieces(weight: torch.Tensor) -> list[slice]:
    rows = max(1, _PIECE // weight.shape[1])
    return [slice(start, start + rows) for start in range(0, len(weight), rows)]
