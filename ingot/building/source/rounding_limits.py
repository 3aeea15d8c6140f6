"""Whether stored values, scales and zeros are those that a weight's rounding gives, as shares of limits: 1
passes.

Scales are derived anew from the weight, by code that shares nothing with what chose them.
Measures:

- ``value``: a value is the nearest to its weight (half a scale, of e4m3 half the gap there), or
  the end of the grid that the weight lies beyond;
- ``scale``: what the weight's range divided by the number of scales gives, as its dtype holds it;
- ``range``: the grid's ends are the weight's, half a scale off at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ingot.quant.schemes.plain_unpacking import PlainGrid

Cuts = Literal["none", "shrunk", "cut"]
Shares = dict[str, torch.Tensor]
_CUT_STEPS = 40  # a range is shrunk by whole fortieths ...
_MOST_CUT = 20  # ... to a half at most
_FLOAT = 2e-6  # relative: what fp32 does on the way
_TIE = 1e-3  # of half a scale: ties that are broken the other way
_INNER_CUTS = 3  # inner scales of w4a8 that are left out to clip a group
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Rule:
    """How the values of a weight follow from it.

    Attributes:
        levels: scales from 0 to the largest magnitude; where there are zeros, from the least to the largest.
        zeros: whether there are.
        stored: dtype of the scales.
        nearest: whether each value is the one nearest to its weight.
        cuts: how the range may have been narrowed: both ends ``shrunk`` alike, or what lies beyond a limit
            ``cut``.
        units: scales are whole multiples of a row's unit, its largest magnitude over this; 0: they are not.
        inner: whether these multiples follow from the range too.
        floating: values are e4m3 times the scale: half as far apart in every lower power of two.
    """

    levels: int
    zeros: bool
    stored: torch.dtype
    nearest: bool
    cuts: Cuts = "none"
    units: int = 0
    inner: bool = False
    floating: bool = False


def judged(
    grid: PlainGrid,
    weight: torch.Tensor,
    rule: Rule,
    peak: torch.Tensor | None = None,
    slack: torch.Tensor | None = None,
) -> Shares:
    """How far each row is off, in parts of the limits.

    Args:
        weight: fp32 [N, G, n], grouped as the grid is.
        slack: of the same shape, how far off the weight itself may be, where factors were derived.
        peak: the largest magnitude that scales are derived from; None: each group's, or row's, own.
    """
    least, most = torch.aminmax(weight, dim=-1)
    low, high = least.clamp(max=0), most.clamp(min=0)
    largest = torch.maximum(high, -low) if peak is None else peak.expand_as(high)
    spread = torch.zeros_like(high) if slack is None else slack.amax(-1)  # [N, G]
    found: Shares = {}
    if rule.units:
        found["scale"] = _of_units(grid, low, high, largest, spread, rule)
        step = grid.scales
        room = torch.full_like(step, torch.inf)
    else:
        low, high, ideal = _narrowed(grid.scales, low, high, largest, rule)
        # The next value that the dtype holds may be far off where it holds few digits.
        absolute = _smallest(rule.stored) + (2 if rule.zeros else 1) * spread / rule.levels
        allowed = 0.51 * torch.finfo(rule.stored).eps + _FLOAT + absolute / ideal.clamp(min=_TINY)
        off = (grid.scales / ideal.clamp(min=_TINY) - 1).abs() / allowed
        found["scale"] = torch.where(ideal > 0, off, 0).amax(-1)
        step = torch.minimum(grid.scales, ideal * (1 + allowed))
        room = (1.0 if rule.levels == 8 else 0.5) + _TIE + rule.levels * allowed
    beyond = torch.maximum(high - grid.high, grid.low - low)
    outside = (beyond - spread) / step.clamp(min=_TINY) / room
    if rule.inner:
        found["range"] = _off_centre(grid, low, high, spread)
    elif peak is None and not rule.units:
        found["range"] = torch.where(step > 0, outside, 0).clamp(min=0).amax(-1)
    if rule.nearest:
        inside = weight.clamp(*_ends(grid, low, high, rule))
        off = (grid.meant - inside).abs()
        if slack is not None:
            # Where a range was cut is as uncertain as the weight that it was derived from.
            cut = (weight < low[..., None]) | (weight > high[..., None])
            off = off - torch.where(cut, 2 * spread[..., None], slack)
        if rule.floating:
            off = off / _gaps(inside / step[..., None].clamp(min=_TINY))
        off = off.amax(-1)
        found["value"] = (off / (step * (0.5 + _TIE) + _TINY)).amax(-1)
    return found


def _gaps(values: torch.Tensor) -> torch.Tensor:
    """How far apart the values of e4m3 around each are: three bits follow the leading one, down to 2^-9."""
    powers = torch.floor(torch.log2(values.abs().clamp(min=2.0**-6)))
    return torch.exp2(powers - 3)


def clipped(grid: PlainGrid, weight: torch.Tensor, rule: Rule) -> torch.Tensor:
    """bool [N, G, n]: values at an end of their grid, of weights no farther off than the grid is long. What
    GPTQ adds to such a weight before it is rounded may lie beyond the end by any amount.
    """
    low, high = torch.aminmax(weight, dim=-1)
    least, most = _ends(grid, low.clamp(max=0), high.clamp(min=0), rule)
    near = grid.scales[..., None] / 4
    ends = (grid.meant <= least + near) | (grid.meant >= most - near)
    return ends & ((grid.meant - weight).abs() <= most - least + near)


def _off_centre(grid: PlainGrid, low: torch.Tensor, high: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Shares [N] of half a scale by which the middle of a grid of w4a8 is off that of the weights, where it
    could be nearer: its zero is one of its values, and all of them are of 8 bits.
    """
    assert grid.units is not None
    step, units = grid.scales.clamp(min=_TINY), grid.units[:, None].clamp(min=_TINY)
    off = (low + high - grid.low - grid.high) / 2  # of a grid that lies too low
    room = torch.where(off > 0, 127 * units - grid.high, grid.low + 128 * units)
    room = room.minimum(torch.where(off > 0, -grid.low, grid.high))
    shares = (off.abs() - spread) / step / (0.5 + _TIE)
    return torch.where(room > step * (1 - _TIE), shares, 0).clamp(min=0).amax(-1)


def _ends(
    grid: PlainGrid, low: torch.Tensor, high: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a weight beyond them is held to, [N, G, 1] each: ends of the grid, and of a range that was cut.
    Of values times a whole factor the side of the largest weight has 8 of them and the other 7.
    """
    least, most = grid.low, grid.high
    if rule.units and not rule.inner:
        up = high > -low
        least = torch.where(up, -7 * grid.scales, -8 * grid.scales)
        most = torch.where(up, 8 * grid.scales, 7 * grid.scales)
    if rule.cuts == "cut":
        least, most = torch.maximum(least, low), torch.minimum(most, high)
    return least[..., None], most[..., None]


def _narrowed(
    scales: torch.Tensor, low: torch.Tensor, high: torch.Tensor, largest: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ends and scales [N, G] of the range that the stored scale is nearest to, among those there may be."""
    if rule.cuts == "none":
        return low, high, _ideal(low, high, largest, rule)
    kept = 1 - torch.arange(_MOST_CUT + 1, device=low.device) / _CUT_STEPS
    if rule.cuts == "shrunk":
        lows, highs = low[..., None] * kept, high[..., None] * kept
    else:
        limit = largest[..., None] * kept
        lows, highs = low[..., None].maximum(-limit), high[..., None].minimum(limit)
    ideals = _ideal(lows, highs, torch.maximum(highs, -lows), rule)
    best = (scales[..., None] / ideals.clamp(min=_TINY) - 1).abs().argmin(-1, keepdim=True)
    low, high, ideal = (part.gather(-1, best)[..., 0] for part in (lows, highs, ideals))
    return low, high, ideal


def _ideal(low: torch.Tensor, high: torch.Tensor, largest: torch.Tensor, rule: Rule) -> torch.Tensor:
    return (high - low if rule.zeros else largest) / rule.levels


def _of_units(
    grid: PlainGrid,
    low: torch.Tensor,
    high: torch.Tensor,
    largest: torch.Tensor,
    spread: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """Shares [N] of the limits of units, and of whole multiples of them."""
    assert grid.units is not None
    peak = largest.amax(-1)
    ideal, uncertain = peak / rule.units, spread.amax(-1) / peak.clamp(min=_TINY)
    off = (grid.units.abs() / ideal.clamp(min=_TINY) - 1).abs() / (_FLOAT + uncertain)
    found = torch.where(ideal > 0, off, 0)
    if rule.inner:
        units = grid.units[:, None].clamp(min=_TINY)
        whole, inner = (high - low) / units / rule.levels, grid.scales / units
        spare = _TIE + uncertain[:, None] * whole
        most = (whole + spare).ceil().clamp(min=1)
        least = ((whole - spare).ceil() - _INNER_CUTS).clamp(min=1)
        odd = torch.maximum(inner - most, least - inner).amax(-1)
        found = torch.where(odd > 0.5, 1 + odd, found)
    return found


def _smallest(dtype: torch.dtype) -> float:
    """The smallest positive value of a dtype, subnormal ones included."""
    kind = torch.finfo(dtype)
    return kind.tiny * kind.eps
