"""The stored tensors of a linear layer in fewer bits beside the weight that they stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from ingot.building.source.plain_readings import SCALED_ROWS, WORD_ROWS, StoredRows, reading_of
from ingot.building.source.rounding_limits import Rule, clipped, judged
from ingot.building.source.tensor_origin import Known
from ingot.layers.linear import Linear
from ingot.quant.methods.moved_weights import Moves
from ingot.quant.schemes.plain_unpacking import PlainGrid, in_groups

Tensors = Mapping[str, torch.Tensor]
_RPTQ_STEP = 2 / 15  # of 4 bits: its values make up for what its activations' blocks lose too
_CPU_VALUES, _VALUES = 1 << 18, 1 << 24  # that are widened at once: a core's cache; another device


@dataclass
class Off:
    """By measure: the largest share of a limit, its row, and how many rows are beyond.

    ``error``: ‖stored - known‖ / ‖known‖ of the weight; None where it came in these values.
    """

    shares: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    beyond: dict[str, int] = field(default_factory=dict)
    _squares: list[tuple[float, float]] = field(default_factory=list)

    @property
    def error(self) -> float | None:
        if not self._squares:
            return None
        off, size = (math.fsum(part) for part in zip(*self._squares, strict=True))
        return math.sqrt(off / size) if size else 0.0

    def compare(self, stored: torch.Tensor, known: torch.Tensor) -> None:
        """Some rows [n, K] of both."""
        off, size = (part.double().square().sum() for part in (stored - known, known))
        self._squares.append((float(off), float(size)))

    def add(self, measure: str, shares: torch.Tensor, start: int = 0) -> None:
        """Shares of rows from ``start`` on; NaN is beyond any limit."""
        shares = shares.nan_to_num(nan=torch.inf)
        worst, row = shares.max(0)
        if measure not in self.shares or float(worst) > self.shares[measure]:
            self.shares[measure], self.rows[measure] = float(worst), start + int(row)
        self.beyond[measure] = self.beyond.get(measure, 0) + int((shares > 1).sum())

    def where(self, measure: str, rows: int) -> str:
        return f"most in row {self.rows[measure]}; {self.beyond[measure]} of {rows} rows"


def judge_narrow(
    linear: Linear,
    method: str,
    tensors: Tensors,
    known: Known,
    dtype: torch.dtype,
    device: torch.device,
    *,
    scales: str = "channel",
) -> Off:
    """How far a layer's values, scales and zeros are off.

    Args:
        method: as in ``QuantConfig``; "stored": values that came with the checkpoint, which must be equal.
        tensors: the layer's, by leaf.
        known: its weight [N, K], columns as the engine stores them except for an ``order``.
        dtype: the engine's.
        scales: weights that share one, as ``weight_scales`` of ``QuantConfig``.
    """
    off = Off()
    rule = None if method == "stored" else reading_of(linear.scheme).rule(linear.scheme, method, dtype)
    weight, columns = known.tensor, linear.in_features
    order = tensors["order"].to(device).long() if "order" in tensors else None
    peaks = _peaks(weight, scales)
    values = _CPU_VALUES if device.type == "cpu" else _VALUES
    rows = max(values // columns // WORD_ROWS, 1) * WORD_ROWS
    for part in _slices(len(weight), rows):
        grid = _grid(linear, tensors, part, device)
        wanted = weight[part].to(device).float()
        slack = _slack(known, wanted, part)
        if order is not None:
            wanted = wanted[:, order]
            slack = None if slack is None else slack[:, order]
        group = grid.meant.shape[-1] if grid.scales.shape[1] > 1 else 0
        blocks = in_groups(wanted, group)
        if rule is None:  # values that somebody else chose must be equal
            different = (grid.meant.flatten(1)[:, :columns] != wanted).any(1)
            off.add("stored", torch.where(different, torch.inf, 0.0), part.start)
            continue
        off.compare(grid.meant.flatten(1)[:, :columns], wanted)
        own = None if slack is None else in_groups(slack, group)
        peak = None if peaks is None else peaks[part].to(device)
        for measure, shares in judged(_cut(grid, blocks), blocks, rule, peak, own).items():
            off.add(measure, shares, part.start)
    if rule is not None and not rule.nearest:
        _add_moved(off, linear, tensors, weight.to(device).float(), rule, dtype, device)
    return off


def _peaks(weight: torch.Tensor, scales: str) -> torch.Tensor | None:
    """The largest magnitudes, fp32 [N, groups], from which scales of more than a row are derived."""
    if scales == "tensor":
        return weight.abs().amax().float().expand(len(weight), 1)
    if scales != "block":
        return None
    tall = torch.stack([rows.abs().amax(0) for rows in weight.split(SCALED_ROWS)]).float()
    largest = tall.unflatten(1, (-1, SCALED_ROWS)).amax(2)
    return largest[torch.arange(len(weight), device=weight.device) // SCALED_ROWS]


def _slack(known: Known, weight: torch.Tensor, rows: slice) -> torch.Tensor | None:
    """How far off each value of some rows may be; None: by fp32's rounding, for which limits have room."""
    if isinstance(known.rows, float) and isinstance(known.columns, float):
        return None
    own = known.rows if isinstance(known.rows, float) else known.rows[rows, None].to(weight.device)
    across = known.columns if isinstance(known.columns, float) else known.columns.to(weight.device)
    return (own + across) * weight.abs()


def _cut(grid: PlainGrid, blocks: torch.Tensor) -> PlainGrid:
    """Without the columns that fill up a row of one group."""
    if grid.meant.shape == blocks.shape:
        return grid
    return replace(grid, meant=grid.meant[..., : blocks.shape[-1]])


def _slices(count: int, rows: int = WORD_ROWS * 64) -> Iterator[slice]:
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def _add_moved(
    off: Off,
    linear: Linear,
    tensors: Tensors,
    weight: torch.Tensor,
    rule: Rule,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Values that make up for one another's errors, by how far rows and columns moved (moved_weights.py)."""
    got = plain_weight(linear, tensors, device)
    farther = _RPTQ_STEP if linear.scheme.form == "blocks" else 0.0
    moves = Moves(chosen=True, least=torch.finfo(dtype).eps, farther=farther)
    # Values at an end of their grid, in the order of ``plain_weight``.
    order = tensors["order"].to(device).long() if "order" in tensors else None
    found = []
    for part in _slices(len(weight)):
        grid = _grid(linear, tensors, part, device)
        wanted = weight[part] if order is None else weight[part][:, order]
        blocks = in_groups(wanted, grid.meant.shape[-1] if grid.scales.shape[1] > 1 else 0)
        found.append(clipped(_cut(grid, blocks), blocks, rule).flatten(1)[:, : linear.in_features])
    ends = torch.cat(found)
    if order is not None:
        ends = torch.empty_like(ends).index_copy_(1, order, ends)
    moved = moves.by_row(weight, got, ends)
    limit = moves.limit(float(moved.median()))
    off.add("value", moved / limit)
    wrong = moves.wrong(weight, got, limit, ends).any(1)
    off.add("weights kept", torch.where(wrong, torch.inf, 0.0))


def plain_weight(linear: Linear, tensors: Tensors, device: torch.device) -> torch.Tensor:
    """W [N, K] fp32 as the stored values mean it, its columns as the input's channels come."""
    if linear.scheme.dense:
        return tensors["weight"].to(device).float()
    grids = (_grid(linear, tensors, part, device) for part in _slices(linear.out_features))
    got = torch.cat([grid.meant.flatten(1) for grid in grids])[:, : linear.in_features]
    if "order" not in tensors:
        return got
    return torch.empty_like(got).index_copy_(1, tensors["order"].to(device).long(), got)


def plain_scales(linear: Linear, tensors: Tensors, device: torch.device) -> torch.Tensor:
    """The scale of each value [N, K], in the order of ``plain_weight``; of a dense weight its largest."""
    count, columns = linear.out_features, linear.in_features
    if linear.scheme.dense:
        return tensors["weight"].abs().amax().float().to(device).expand(count, columns)
    grids = (_grid(linear, tensors, part, device) for part in _slices(count))
    return torch.cat([one.scales[..., None].expand(one.meant.shape).flatten(1)[:, :columns] for one in grids])


def _grid(linear: Linear, tensors: Tensors, rows: slice, device: torch.device) -> PlainGrid:
    reading = reading_of(linear.scheme)
    return reading.grid(linear.scheme, StoredRows(tensors, rows, device), linear.in_features)
