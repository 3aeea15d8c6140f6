"""GPTQ: values chosen column by column, each rounding error made good in the columns that follow.

Source: Frantar et al., "GPTQ" (arXiv 2210.17323). With H = mean of x·xᵀ over tokens, damped, and U the upper
factor of its inverse, H⁻¹ = UᵀU: column j becomes its nearest value, and the columns k > j take
e · U[j, k], where e = (w_j - ŵ_j) / U[j, j]. The output error is tr((W - Ŵ) H (W - Ŵ)ᵀ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ingot.device import on_device
from ingot.errors import BuildError, ConfigError
from ingot.kernels.weight.gptq_block import gptq_block
from ingot.quant.methods.rounding import (
    CLIP_RATIOS,
    Grid,
    as_quantized,
    best_grid,
    bounds,
    check,
    in_groups,
    value_dtype,
    weighed,
)
from ingot.quant.quantized_values import Quantized

_BLOCK = 128  # columns whose updates of the columns behind them are made at once
_PANEL = 2048  # columns of a matrix with a triangle to spare that are computed at once
_TRIES = 4  # each with ten times the damping

GridRule = Callable[[torch.Tensor], Grid]  # weights [N, groups, n] → the grid of each block


class HessianSum:
    """The sum of x·xᵀ over tokens, in fp32 (or fp64), on a device.

    Only panels from the diagonal to the right are summed: of 11008 columns 0.59 of the products.
    """

    def __init__(
        self, in_features: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.count = 0
        self._sum = torch.zeros(in_features, in_features, dtype=dtype, device=device)

    def add(self, x: torch.Tensor) -> None:
        """Tokens [T, K] of any dtype."""
        rows = x.to(self._sum)
        for start, end in _panels(len(self._sum)):
            self._sum[start:end, start:].addmm_(rows[:, start:end].T, rows[:, start:])
        self.count += x.shape[0]

    @property
    def total(self) -> torch.Tensor:
        """[K, K], the sum of x·xᵀ."""
        for start, end in _panels(len(self._sum)):
            self._sum[end:, start:end] = self._sum[start:end, end:].T
        return self._sum

    def mean(self) -> torch.Tensor:
        """[K, K], mean of x·xᵀ; BuildError where no token was added or the sum is not finite."""
        if not self.count:
            raise BuildError("calibration saw no tokens", fix="`calib` with at least one sample")
        total = self.total
        if not bool(torch.isfinite(total).all()):
            what, seen = "activations are not finite during calibration", "inf or NaN in an input"
            raise BuildError(what, seen=seen, fix="`dtype=bf16`")
        return total / self.count


@dataclass(frozen=True, slots=True)
class Compensated:
    """What ``gptq`` found.

    Attributes:
        damping: the share of the mean diagonal that was added in the end.
        order: [K] int64, where the values' column j is the weight's column ``order[j]``; None: by column.
    """

    quantized: Quantized
    damping: float
    order: torch.Tensor | None = None


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    group: int = 0,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    static_groups: bool = False,
    damping: float = 0.01,
    scale_dtype: torch.dtype = torch.float16,
    clip: bool = False,
    grid: Grid | None = None,
    rule: GridRule | None = None,
) -> Compensated:
    """Values of a weight [N, K] that keep its outputs; the same again for the same input on a machine.

    A column whose input was 0 in all of calibration is rounded as it is (the paper's code sets it to 0): such
    an input may still occur.

    Args:
        hessian: [K, K], ``HessianSum.mean()`` or a multiple of it.
        act_order: take the columns of largest input first. With groups and without ``static_groups`` a group
            is then of columns that follow each other in that order: ``order`` says which, and the product has
            to gather its input.
        static_groups: scales come from the weight as it is, by column; else from the weight as it stands,
            corrected, when its group's turn comes. With ``act_order`` they are the best that is stored by
            column, which costs nothing at run time.
        damping: share of the mean diagonal that is added to the diagonal; ten times as much each time that
            the factorization fails.
        clip: shrink each range by the ratio of ``CLIP_RATIOS`` that leaves the least squared error; where
            scales come from the weight as it is, the diagonal of the Hessian weighs the columns. It helps
            whole rows of 4 bits, and else little.
        grid: fixed zeros and scales [N, groups] by column, which ``scale_dtype`` holds exactly.
        rule: how scales come from weights, instead of ``quantize``'s.

    Raises ConfigError or BuildError as ``quantize``, or where the Hessian does not fit or cannot be
    factorized.
    """
    check(weight, bits, group)
    columns, hessian = weight.shape[1], hessian.to(weight.device)
    if hessian.shape != (columns, columns):
        seen, allowed = list(hessian.shape), [columns, columns]
        raise ConfigError("the Hessian has the wrong shape", seen=seen, allowed=allowed)
    if not bool(torch.isfinite(hessian).all()):
        raise BuildError("activations are not finite during calibration", fix="`dtype=bf16`")
    order = torch.arange(columns, device=hessian.device)
    if act_order:  # of equal inputs the first comes first
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor, damping = _factor(hessian, order, damping)
    wide, static = weight.float(), static_groups or not group
    if rule is None:
        cost = weighed(hessian.diagonal() if static else None, group)
        ratios = CLIP_RATIOS if clip else CLIP_RATIOS[:1]
        rule = partial(
            best_grid, bits=bits, symmetric=symmetric, scale_dtype=scale_dtype, ratios=ratios, cost=cost
        )
    if grid is None and static:
        grid = rule(in_groups(wide, group))
    walk = _Walk(wide.T[order].contiguous(), factor, value_dtype(bits, symmetric))
    moves = grid is None and act_order
    if grid is None:
        low, high = bounds(bits, symmetric)
        values, scales, zeros = walk.moving(rule, low, high, group)
    else:
        groups = order // group if group else torch.zeros_like(order)
        values, scales, zeros = walk.fixed(grid, groups), grid.scales, grid.zeros
    if not moves:
        values = torch.empty_like(values).index_copy_(0, order, values)  # by column again
    found = as_quantized(values.T.contiguous(), scales, zeros, bits, group, symmetric, scale_dtype)
    return Compensated(found, damping, order if moves else None)


class _Walk:
    """One pass over the columns in the order in which they are taken; it changes ``weight`` [K, N], fp32."""

    def __init__(self, weight: torch.Tensor, factor: torch.Tensor, kind: torch.dtype) -> None:
        self.weight = weight
        self.factor = factor
        self.inverse = 1 / factor.diagonal()
        self.values = torch.empty(weight.shape, dtype=kind, device=weight.device)

    def fixed(self, grid: Grid, groups: torch.Tensor) -> torch.Tensor:
        """Values [K, N] of a grid that is known; ``groups`` int64 [K]: which of its groups a column has."""
        known = _by_group(grid)
        for start, end in _panels(len(self.weight), _BLOCK):
            errors = self._run(start, end, known, groups[start:end])
            self._correct(start, end, len(self.weight), errors)
        return self.values

    def moving(
        self, rule: GridRule, low: int, high: int, group: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [K, N], scales and zeros [N, groups]: each group's grid is that of its weights as they are
        when its first column comes. Groups within a block correct each other one by one.
        """
        found: list[Grid] = []
        columns = len(self.weight)
        # A block is whole groups, or a whole part of one, so that a group starts with all corrections made.
        width = _BLOCK if group % _BLOCK == 0 else group * max(1, _BLOCK // group)
        for start, end in _panels(columns, width):
            errors = torch.empty_like(self.weight[start:end])
            for first in range(start, end, min(group, _BLOCK)):
                last = min(first + min(group, _BLOCK), end)
                if first % group == 0:
                    grid = rule(self.weight[first : first + group].T[:, None])
                    found.append(Grid(grid.scales, grid.zeros, low, high))
                groups = torch.zeros(last - first, dtype=torch.int64, device=errors.device)
                own = self._run(first, last, _by_group(found[-1]), groups)
                errors[first - start : last - start] = own
                self._correct(first, last, end, own)
            self._correct(start, end, columns, errors)
        return self.values, torch.cat([g.scales for g in found], 1), torch.cat([g.zeros for g in found], 1)

    def _run(self, start: int, end: int, grid: Grid, groups: torch.Tensor) -> torch.Tensor:
        """Choose the values of columns that are corrected for all before ``start``; their errors."""
        own = slice(start, end)
        with on_device(self.weight.device):
            return gptq_block(
                self.weight[own],
                self.factor[own, own],
                self.inverse[own],
                grid.scales,
                grid.zeros,
                groups,
                grid.low,
                grid.high,
                self.values[own],
            )

    def _correct(self, start: int, end: int, until: int, errors: torch.Tensor) -> None:
        """Make the errors of columns ``start`` to ``end`` good in those behind, up to ``until``."""
        if end < until:
            self.weight[end:until].addmm_(self.factor[start:end, end:until].T, errors, alpha=-1)


def _by_group(grid: Grid) -> Grid:
    """A grid [N, groups] as [groups, N], in fp32."""
    scales, zeros = (part.float().T.contiguous() for part in (grid.scales, grid.zeros))
    return Grid(scales, zeros, grid.low, grid.high)


def _panels(columns: int, width: int = _PANEL) -> Iterator[tuple[int, int]]:
    """Where each ``width`` columns begin and end."""
    return ((start, min(start + width, columns)) for start in range(0, columns, width))


def _factor(hessian: torch.Tensor, order: torch.Tensor, damping: float) -> tuple[torch.Tensor, float]:
    """U, upper, with UᵀU the inverse of the damped Hessian in that order, computed in fp64 and rounded to
    fp32; and the damping.

    H = R·Rᵀ with R upper (Cholesky from the last column up), so H⁻¹ = R⁻ᵀ·R⁻¹ and U = R⁻¹: one factorization
    and one triangular solve, without ever forming the inverse. A panel of U ends at the diagonal, as do the
    rows that it is solved with: of 11008 columns 0.42 of the operations of a whole solve.
    """
    back = order.flip(0)
    wide = hessian[back[:, None], back].double()
    diagonal = wide.diagonal()
    if not bool((diagonal > 0).any()):
        raise BuildError("calibration's inputs are all 0", fix="`calib`")
    mean = float(diagonal.mean())
    diagonal[diagonal <= 0] = mean
    added = 0.0
    for _ in range(_TRIES):
        diagonal += (damping - added) * mean
        added = damping
        lower, failed = torch.linalg.cholesky_ex(wide)
        if not int(failed):
            break
        damping = damping * 10 if damping else 1e-4
    else:
        seen = f"damping up to {added:g}"
        raise BuildError("the Hessian cannot be factorized", seen=seen, fix="more samples")
    upper = lower.flip(0, 1)
    del wide, diagonal, lower  # [K, K] in fp64 is 1 GB for a 7B's widest input
    found = torch.zeros(upper.shape, dtype=torch.float32, device=upper.device)
    for start, end in _panels(len(upper)):
        one = upper.new_zeros(end, end - start)
        one[start:].fill_diagonal_(1.0)
        found[:end, start:end] = torch.linalg.solve_triangular(upper[:end, :end], one, upper=True)
    return found, damping
