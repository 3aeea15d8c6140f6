"""GPTQ: values chosen column by column, each rounding error made good in the columns that follow.

Covers the sum of input products (the Hessian of the output error) and the choice of values by it.

    seen = HessianSum(in_features)
    seen.add(x)                                            # [T, K], as often as there are batches
    found = gptq(weight, seen.mean(), bits=4, group=128).quantized

Source: Frantar et al., "GPTQ" (arXiv 2210.17323). With H = mean of x·xᵀ over tokens, damped, and U the upper
factor of its inverse, H⁻¹ = UᵀU: column j becomes its nearest value, and the columns k > j take
e · U[j, k], where e = (w_j - ŵ_j) / U[j, j]. The output error is tr((W - Ŵ) H (W - Ŵ)ᵀ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    dequantize,
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
        """[K, K], mean of x·xᵀ.

        Raises:
            BuildError: no token was added, or the sum is not finite.
        """
        if not self.count:
            raise BuildError("calibration saw no tokens", fix="`calib` with at least one sample")
        total = self.total
        if not bool(torch.isfinite(total).all()):
            raise BuildError(
                "activations are not finite during calibration",
                seen="inf or NaN in an input",
                fix="`dtype=bf16`",
            )
        return total / self.count


@dataclass(frozen=True, slots=True)
class Compensated:
    """What ``gptq`` found.

    Attributes:
        quantized: the values.
        damping: the share of the mean diagonal that was added in the end.
        order: [K] int64, where the values' column j is the weight's column ``order[j]``; None: by column.
    """

    quantized: Quantized
    damping: float
    order: torch.Tensor | None = None
    _weight: torch.Tensor = field(kw_only=True, repr=False)
    _hessian: torch.Tensor = field(kw_only=True, repr=False)

    @property
    def error(self) -> float:
        """Mean over tokens of the squared distance of the outputs, by weight and Hessian as they were given;
        2·N·K² operations.
        """
        near = dequantize(self.quantized)
        if self.order is not None:
            near = torch.empty_like(near).index_copy_(1, self.order, near)
        return output_error(self._weight.float() - near, self._hessian)


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
            to gather its input. Our own builds use ``static_groups``, which keep neighbours together and cost
            nothing at run time.
        static_groups: scales come from the weight as it is, by column; else from the weight as it stands,
            corrected, when its group's turn comes. With ``act_order`` they are the best that is stored by
            column: on the pocket model in 4 bits, groups of 128, KL 0.0008 to fp32, 0.0010 without both,
            0.0022 by rounding.
        damping: share of the mean diagonal that is added to the diagonal; ten times as much each time that
            the factorization fails.
        clip: as in ``quantize``; where scales come from the weight as it is, the diagonal of the Hessian is
            the importance of columns. It helps whole rows of 4 bits, and else little.
        grid: fixed zeros and scales [N, groups] by column, which ``scale_dtype`` holds exactly.
        rule: how scales come from weights, instead of ``quantize``'s.

    Raises:
        ConfigError: as ``quantize``, or the Hessian has another shape.
        BuildError: as ``quantize``, or the Hessian cannot be factorized.
    """
    check(weight, bits, group)
    columns, hessian = weight.shape[1], hessian.to(weight.device)
    _check_hessian(hessian, columns)
    order = _order(hessian, act_order)
    factor, damping = _factor(hessian, order, damping)
    wide, static = weight.float(), static_groups or not group
    if rule is None:
        importance = hessian.diagonal() if static else None
        rule = _rule(bits, group, symmetric, scale_dtype, clip, importance)
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
    kept = values.T.contiguous()
    found = as_quantized(kept, scales, zeros, bits, group, symmetric, scale_dtype)
    return Compensated(found, damping, order if moves else None, _weight=weight, _hessian=hessian)


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(E H Eᵀ) for E = W - Ŵ [N, K]: mean over tokens of |E x|² for H = mean of x·xᵀ."""
    wide = difference.to(hessian.dtype)
    return float((wide @ hessian * wide).double().sum())


class _Walk:
    """One pass over the columns, which lie in the order in which they are taken: ``weight`` [K, N], fp32, is
    changed.
    """

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
        for start, end in _panels(columns, _block(group)):
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


def _block(group: int) -> int:
    """Columns of a block whose scales move: whole groups of them, or a whole part of a group, so that a group
    starts with all corrections made.
    """
    return _BLOCK if group % _BLOCK == 0 else group * max(1, _BLOCK // group)


def _panels(columns: int, width: int = _PANEL) -> Iterator[tuple[int, int]]:
    """Where each ``width`` columns begin and end."""
    return ((start, min(start + width, columns)) for start in range(0, columns, width))


def _rule(
    bits: int,
    group: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    clip: bool,
    importance: torch.Tensor | None,
) -> GridRule:
    """``quantize``'s choice of scales."""
    ratios = CLIP_RATIOS if clip else CLIP_RATIOS[:1]
    cost = None if importance is None else weighed(importance, group)
    return partial(
        best_grid, bits=bits, symmetric=symmetric, scale_dtype=scale_dtype, ratios=ratios, cost=cost
    )


def _check_hessian(hessian: torch.Tensor, columns: int) -> None:
    if hessian.shape != (columns, columns):
        raise ConfigError(
            "the Hessian has the wrong shape", seen=list(hessian.shape), allowed=[columns, columns]
        )
    if not bool(torch.isfinite(hessian).all()):
        raise BuildError("activations are not finite during calibration", fix="`dtype=bf16`")


def _order(hessian: torch.Tensor, act_order: bool) -> torch.Tensor:
    """Columns in the order in which they are taken; of equal inputs the first comes first."""
    if act_order:
        return torch.argsort(hessian.diagonal(), descending=True, stable=True)
    return torch.arange(hessian.shape[0], device=hessian.device)


def _factor(hessian: torch.Tensor, order: torch.Tensor, damping: float) -> tuple[torch.Tensor, float]:
    """U, upper, with UᵀU the inverse of the damped Hessian in that order, computed in fp64 and rounded to
    fp32; and the damping.

    H = R·Rᵀ with R upper (Cholesky from the last column up), so H⁻¹ = R⁻ᵀ·R⁻¹ and U = R⁻¹: one factorization
    and one triangular solve, without ever forming the inverse.
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
            upper = lower.flip(0, 1)
            del wide, diagonal, lower  # [K, K] in fp64 is 1 GB for a 7B's widest input
            return _inverse(upper), damping
        damping = damping * 10 if damping else 1e-4
    raise BuildError("the Hessian cannot be factorized", seen=f"damping up to {added:g}", fix="more samples")


def _inverse(upper: torch.Tensor) -> torch.Tensor:
    """Of an upper triangular matrix in fp64, in fp32. A panel of it ends at the diagonal, as do the rows that
    it is solved with: of 11008 columns 0.42 of the operations of a whole solve.
    """
    found = torch.zeros(upper.shape, dtype=torch.float32, device=upper.device)
    for start, end in _panels(len(upper)):
        one = upper.new_zeros(end, end - start)
        one[start:].fill_diagonal_(1.0)
        found[:end, start:end] = torch.linalg.solve_triangular(upper[:end, :end], one, upper=True)
    return found
