"""Weights rounded to 8 or 4 bits: the choice of scales and zeros, and the values that follow from them.

W ≈ (q - zero) · scale. A scale belongs to a row, or to ``group`` neighbouring columns of a row; it is rounded
to the dtype in which it is stored before values are chosen, so that no error of its own remains.

- 8 bits, symmetric: q in -127..127, zero 0, scale = max|w| / 127.
- 4 bits, symmetric: q in 0..15, zero 8. The weight of largest magnitude becomes 0, which is -8 scales:
  scale = -w / 8, negative where that weight is positive. All 16 values are used. Relative error (RMS) of
  normally distributed weights in groups of 128: 0.1176 for max|w| / 7, 0.1111 for / 7.5, 0.1059 for / 8 and
  0.1035 for this; in groups of 32: 0.0971, 0.0949, 0.0938, 0.0861.
- asymmetric: q in 0..2^bits - 1 over [min(w, 0), max(w, 0)], with a whole zero: 0.1008 and 0.0809 there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.device import dtype_name
from ingot.errors import BuildError, ConfigError
from ingot.kernels.rows.int8_rows import BLOCK, E4M3, E4M3_MOST
from ingot.quant.quantized_values import Quantized

BITS = (8, 4)
CLIP_RATIOS = tuple(1 - step / 40 for step in range(21))  # 1, 0.975 … 0.5
_PIECE = 1 << 24  # weights that are widened at once
GroupError = Callable[[torch.Tensor], torch.Tensor]  # differences [N, groups, n] → their cost [N, groups]


@dataclass(frozen=True, slots=True)
class Grid:
    """What quantized values can mean: (q - zero) · scale with ``low`` <= q <= ``high``.

    ``scales`` and ``zeros`` are floating-point tensors of one shape [...], for weights [..., n].
    """

    scales: torch.Tensor
    zeros: torch.Tensor
    low: int
    high: int

    def nearest(self, weight: torch.Tensor) -> torch.Tensor:
        """The values nearest to weights [..., n], as floating point; halves go to the even one."""
        values = (weight / self.scales[..., None]).round_()
        return values.add_(self.zeros[..., None]).clamp_(self.low, self.high)

    def meant(self, values: torch.Tensor) -> torch.Tensor:
        """The weights that values [..., n] stand for."""
        return (values - self.zeros[..., None]) * self.scales[..., None]


def quantize(
    weight: torch.Tensor,
    bits: int,
    group: int = 0,
    *,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float16,
) -> Quantized:
    """Every weight [N, K] to its nearest value. A row or group of zeros stays exact, with scale 1.

    Args:
        bits: 8 or 4.
        group: columns that share a scale, 0 for whole rows; K need not be a multiple.

    Raises:
        ConfigError: there are no such values, or the shapes do not fit.
        BuildError: a weight is not finite, or a scale does not fit its dtype.
    """
    check(weight, bits, group)
    kind = value_dtype(bits, symmetric)
    values = torch.empty(weight.shape, dtype=kind, device=weight.device)
    grids = []
    rows = max(1, _PIECE // max(weight.shape[1], 1))
    for start in range(0, weight.shape[0], rows):
        piece = weight[start : start + rows]
        blocks = in_groups(widened(piece), group)
        grid = best_grid(blocks, bits, symmetric, scale_dtype)
        grids.append(grid)
        values[start : start + rows] = grid.nearest(blocks).flatten(1)[:, : weight.shape[1]].to(kind)
    scales, zeros = (torch.cat(parts) for parts in zip(*((g.scales, g.zeros) for g in grids), strict=True))
    return as_quantized(values, scales, zeros, bits, group, symmetric, scale_dtype)


def quantize_e4m3(weight: torch.Tensor, *, per_tensor: bool = False) -> Quantized:
    """Every weight [N, K] to its nearest value of e4m3 times its row's scale, largest magnitude / 448, or one
    of all rows. A row of zeros has scale 1.

    Raises as ``quantize``.
    """
    check(weight, BITS[0], 0)
    values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    rows, kept = max(1, _PIECE // max(weight.shape[1], 1)), []
    peak = widened(weight.abs().amax()) if per_tensor else None
    for start in range(0, weight.shape[0], rows):
        piece = widened(weight[start : start + rows])
        largest = piece.abs().amax(1) if peak is None else peak.expand(len(piece))
        scales = _stored(largest / E4M3_MOST, torch.float32)
        exact = (piece / scales[:, None]).clamp(-E4M3_MOST, E4M3_MOST)
        values[start : start + rows] = exact.to(E4M3)  # to the nearest, halves to the even one
        kept.append(scales.float())
    return Quantized(values, torch.cat(kept), None, BITS[0], 0)


def quantize_e4m3_blocks(weight: torch.Tensor) -> Quantized:
    """Every weight [N, K] to its nearest value of e4m3 times the scale of its block of 128 rows and columns,
    largest magnitude / 448; K is a multiple of 128. A block of zeros has scale 1.

    Raises as ``quantize``.
    """
    check(weight, BITS[0], 0)
    values, kept = torch.empty(weight.shape, dtype=E4M3, device=weight.device), []
    for start in range(0, len(weight), BLOCK):
        pieces = widened(weight[start : start + BLOCK]).unflatten(1, (-1, BLOCK))  # [rows, blocks, 128]
        scales = _stored(pieces.abs().amax((0, 2)) / E4M3_MOST, torch.float32)
        exact = (pieces / scales[:, None]).clamp(-E4M3_MOST, E4M3_MOST)
        values[start : start + BLOCK] = exact.flatten(1).to(E4M3)  # to the nearest, halves to the even one
        kept.append(scales.float()[:, None].expand(-1, len(pieces)))
    return Quantized(values, torch.cat(kept, 1), None, BITS[0], BLOCK)


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """W [N, K] that the values stand for: computed in fp32 (fp64 where that is the dtype), rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = quantized.values.to(wide)
    if quantized.zeros is not None:
        values = values - _beside(quantized.zeros, quantized).to(wide)
    elif quantized.values.dtype == torch.uint8:
        values = values - (1 << (quantized.bits - 1))
    weight = (values * _beside(quantized.scales, quantized).to(wide)).to(dtype)
    return weight if quantized.order is None else weight[:, quantized.order.long().argsort()]


def grid_of(
    blocks: torch.Tensor, bits: int, symmetric: bool, scale_dtype: torch.dtype, ratio: torch.Tensor
) -> Grid:
    """The grid of each block of weights [..., n] (fp32 or fp64), its range shrunk by ``ratio`` [...].

    Raises BuildError where a scale does not fit ``scale_dtype``.
    """
    smallest = blocks.amin(-1).clamp_(max=0) * ratio
    largest = blocks.amax(-1).clamp_(min=0) * ratio
    low, high = bounds(bits, symmetric)
    if not symmetric:
        scales = _stored((largest - smallest) / high, scale_dtype)
        return Grid(scales, (-smallest / scales).round_().clamp_(low, high), low, high)
    peak = torch.maximum(largest, -smallest)
    if bits == 8:
        return Grid(_stored(peak / high, scale_dtype), torch.zeros_like(peak), low, high)
    half = 1 << (bits - 1)
    scales = _stored(peak / half, scale_dtype)
    scales = torch.where(largest > -smallest, -scales, scales)
    return Grid(scales, torch.full_like(peak, half), low, high)


def best_grid(
    blocks: torch.Tensor,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    ratios: tuple[float, ...] = (1.0,),
    cost: GroupError | None = None,
) -> Grid:
    """The grid of each block [N, groups, n], its range shrunk by the ratio that costs least.

    A cost of None is the sum of squared differences; of equal ratios the first is taken.
    """
    best = blocks.new_full(blocks.shape[:2], ratios[0])
    least = torch.full_like(best, torch.inf)
    for ratio in ratios if len(ratios) > 1 else ():
        grid = grid_of(blocks, bits, symmetric, scale_dtype, torch.full_like(best, ratio))
        error = (cost or weighed(None, 0))(grid.meant(grid.nearest(blocks)) - blocks)
        best = torch.where(error < least, ratio, best)
        least = torch.minimum(error, least)
    return grid_of(blocks, bits, symmetric, scale_dtype, best)


def bounds(bits: int, symmetric: bool) -> tuple[int, int]:
    return (-127, 127) if symmetric and bits == 8 else (0, (1 << bits) - 1)


def value_dtype(bits: int, symmetric: bool) -> torch.dtype:
    """The dtype of values that are stored one per byte."""
    return torch.int8 if symmetric and bits == 8 else torch.uint8


def in_groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[N, K] → [N, groups, group], the last group filled with zeros; ``group`` 0: [N, 1, K]."""
    if not group:
        return weight[:, None, :]
    missing = -weight.shape[1] % group
    return torch.nn.functional.pad(weight, (0, missing)).unflatten(1, (-1, group))


def weighed(importance: torch.Tensor | None, group: int) -> GroupError:
    """The cost of differences when the squares of each column count ``importance`` [K] times; None: once."""
    if importance is None:
        return lambda difference: difference.square().sum(-1)
    weights = in_groups(widened(importance)[None], group)  # [1, groups, n]
    return lambda difference: (difference.square() * weights).sum(-1)


def as_quantized(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
) -> Quantized:
    """Values [N, K] with a grid's scales and zeros [N, groups], in the shapes in which they are kept."""

    def kept(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (tensor.T if group else tensor[:, 0]).to(dtype).contiguous()

    stored_zeros = None if symmetric else kept(zeros, torch.uint8)
    return Quantized(values, kept(scales, scale_dtype), stored_zeros, bits, group)


def check(weight: torch.Tensor, bits: int, group: int) -> None:
    """Raise ConfigError unless a matrix can have such values, BuildError for a value that is not finite."""
    if bits not in BITS:
        raise ConfigError("unsupported number of bits", seen=bits, allowed=list(BITS))
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        seen = f"{list(weight.shape)} {weight.dtype}"
        raise ConfigError("only floating-point matrices can be quantized", seen=seen)
    if group < 0:
        raise ConfigError("a group size must be 0 or positive", seen=group)
    finite = torch.isfinite(weight).all(dim=1)
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        row = weight[bad[0]]
        column = int((~torch.isfinite(row)).nonzero()[0])
        raise BuildError(
            "a weight has values that are not finite",
            seen=f"row {bad[0]}, column {column}: {row[column]:g}; {len(bad)} of {len(finite)} rows",
            fix="the checkpoint",
        )


def widened(weight: torch.Tensor) -> torch.Tensor:
    """fp32, or fp64 as it is."""
    return weight if weight.dtype == torch.float64 else weight.float()


def _stored(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Positive scales as ``dtype`` stores them, widened again; 1 in the place of 0.

    Below fp16's normal numbers rounding may lose a large part of a scale, and with it the ends of its range;
    such a scale is rounded up.
    """
    if dtype == torch.float64:
        return torch.where(scales == 0, torch.ones_like(scales), scales)
    short = scales.to(dtype)
    if not bool(torch.isfinite(short).all()):
        what, seen = f"a scale does not fit {dtype_name(dtype)}", f"{float(scales.max()):.4g}"
        raise BuildError(what, seen=seen, fix="`dtype=bf16`")
    bits = short.view(torch.int32 if dtype == torch.float32 else torch.int16)
    lost = short.to(scales.dtype) < scales * (1 - 2**-8)
    kept = (bits + lost.to(bits.dtype)).view(dtype).to(scales.dtype)  # the next float has the next bits
    return torch.where(scales == 0, torch.ones_like(scales), kept)


def _beside(tensor: torch.Tensor, quantized: Quantized) -> torch.Tensor:
    """Scales or zeros as they stand beside the columns: [N, 1] or [N, K]."""
    if tensor.dim() == 1:
        return tensor[:, None]
    columns = quantized.values.shape[1]
    return tensor.repeat_interleave(quantized.group, dim=0)[:columns].T
