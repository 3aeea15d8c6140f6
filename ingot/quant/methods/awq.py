"""AWQ: the weights that read outlier channels are scaled up before they are rounded.

Source: Lin et al., "AWQ" (arXiv 2306.00978): s = m^r, m the mean magnitude of each channel, over a grid of r;
also s = m^r / v^(1 - r) with v the mean of the channel's weights relative to their group's largest, as its
authors' code offers. The least error of the outputs wins; r = 0 (no scaling) is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ingot.errors import ConfigError
from ingot.quant.methods.channel_folding import Scaling, best_scaling, class_mean
from ingot.quant.methods.rounding import CLIP_RATIOS, best_grid, check, in_groups

STEPS = 20
_RANGE = 1e4  # most that the scales of two channels differ by: a norm's weight divided by them fits 16 bits
_PIECE = 1 << 24

FakeQuantize = Callable[[torch.Tensor], torch.Tensor]


def search_scales(
    weights: Sequence[torch.Tensor],
    x: torch.Tensor,
    fake: FakeQuantize,
    *,
    group: int = 0,
    magnitude: torch.Tensor | None = None,
    steps: int = STEPS,
    classes: torch.Tensor | None = None,
) -> Scaling:
    """Scales of an input that all of ``weights`` [N, K] read, by the error of their products with ``x``.

    Args:
        x: [T, K], a sample of the input; some hundred tokens are enough.
        fake: what rounding makes of a weight: [N, K] → [N, K].
        group: columns whose largest weight counts together.
        magnitude: [K], mean of |x_j| in all of calibration; None: of ``x``.
        steps: exponents that are tried, each twice.
        classes: channels that share a scale (channel_folding.py).
    """
    if not weights or any(weight.shape[1] != x.shape[1] for weight in weights):
        widths = [weight.shape[-1] for weight in weights]
        raise ConfigError("weights and activations have different widths", seen=widths, allowed=x.shape[1])
    x = x.float()
    wide = [weight.to(x) for weight in weights]
    magnitudes = x.abs().mean(0) if magnitude is None else magnitude.to(x)

    def error(scales: torch.Tensor) -> float:
        distances = [
            (x @ (fake(weight * scales) / scales - weight).T).square().double().sum() for weight in wide
        ]
        return float(torch.stack(distances).sum()) / x.shape[0]

    shares = class_mean(_share(wide, group), classes)
    return best_scaling(magnitudes, _candidates(class_mean(magnitudes, classes), shares, steps), error)


def clip_limits(
    weight: torch.Tensor,
    x: torch.Tensor,
    bits: int,
    group: int = 0,
    *,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """The largest magnitude that each row, or group of a row, should keep: [N] or [groups, N] fp32.

    The one that leaves the least error of its own part of the product with ``x`` [T, K]: the sum over tokens
    of (e·x)², which is e H eᵀ with H the part's sum of x·xᵀ. Queries and keys are better left alone: their
    errors multiply. Errors are as of ``quantize``.
    """
    check(weight, bits, group)
    parts = in_groups(x.float(), group)  # [T, groups, n]
    hessians = torch.einsum("tgi,tgj->gij", parts, parts)
    limits = []
    for piece in weight.split(max(1, _PIECE // weight.shape[1])):
        blocks = in_groups(piece.float(), group)  # [N, groups, n]
        peak = blocks.abs().amax(-1)
        best, least = peak, torch.full_like(peak, torch.inf)
        for ratio in CLIP_RATIOS:
            limit = peak * ratio
            narrow = _cut(blocks, limit[..., None])
            grid = best_grid(narrow, bits, symmetric, scale_dtype)
            difference = grid.meant(grid.nearest(narrow)) - blocks
            error = (torch.einsum("rgi,gij->rgj", difference, hessians) * difference).sum(-1)
            best = torch.where(error < least, limit, best)
            least = torch.minimum(error, least)
        limits.append(best)
    found = torch.cat(limits)
    return found.T.contiguous() if group else found[:, 0]


def clipped(weight: torch.Tensor, limits: torch.Tensor, group: int = 0) -> torch.Tensor:
    """The weight [N, K] with magnitudes cut at ``clip_limits``'s limits."""
    wide = limits[:, None] if not group else limits.repeat_interleave(group, 0)[: weight.shape[1]].T
    return _cut(weight, wide.to(weight.dtype))


def _cut(weight: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    return torch.maximum(torch.minimum(weight, limit), -limit)


def _candidates(
    magnitudes: torch.Tensor, share: torch.Tensor, steps: int
) -> Iterator[tuple[float, torch.Tensor]]:
    """(exponent, scales [K]); none where all inputs or all weights are 0."""
    magnitudes, share = (part.clamp(min=float(part.max()) / _RANGE) for part in (magnitudes, share))
    if not (float(magnitudes.max()) > 0 and float(share.max()) > 0):
        return
    for step in range(1, steps + 1):
        ratio = step / steps
        for scales in (magnitudes.pow(ratio), magnitudes.pow(ratio) / share.pow(1 - ratio)):
            scales = scales / (scales.max() * scales.min()).sqrt()  # about 1, within what 16 bits can carry
            yield ratio, scales.clamp(_RANGE**-0.5, _RANGE**0.5)


def _share(weights: Sequence[torch.Tensor], group: int) -> torch.Tensor:
    """Mean over all rows of |w_j| / max|w| of its group, [K]."""
    columns = weights[0].shape[1]
    sums = torch.zeros(columns, device=weights[0].device)
    for weight in weights:
        blocks = in_groups(weight.abs(), group)
        sums += (blocks / blocks.amax(-1, keepdim=True).clamp(min=1e-12)).sum(0).flatten()[:columns]
    return sums / sum(weight.shape[0] for weight in weights)
