"""SmoothQuant: scale outlier channels of activations down, and the weights that read them up.

Source: Xiao et al., "SmoothQuant" (arXiv 2211.10438): s_j = max|x_j|^alpha / max|w_j|^(1 - alpha), the
maximum of weights over all that read the same input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.errors import ConfigError
from ingot.kernels.rows.int8_rows import LEAST, MOST
from ingot.quant.methods.channel_folding import Scaling, best_scaling, class_max

ALPHAS = tuple(step / 20 for step in range(4, 20))  # 0.2, 0.25 … 0.95
_FLOOR = 1e-5  # the least magnitude that scales are computed from, as in the paper's code


def smoothing_scales(
    act_max: torch.Tensor,
    weights: Sequence[torch.Tensor],
    alpha: float = 0.5,
    *,
    classes: torch.Tensor | None = None,
    keep_dead: bool = True,
) -> torch.Tensor:
    """Scales [K] fp32 of an input that ``weights`` [N, K] read.

    Args:
        act_max: [K], largest magnitude of each channel in calibration.
        alpha: 0 leaves the activations as they are, 1 makes all their channels equally large.
        classes: channels that share a scale (channel_folding.py).
        keep_dead: a channel that calibration never saw above 1e-5 gets 1. The paper's code gives it 1e-5 or
            so, which a norm's weight divided by it turns into an outlier channel as soon as it is not quite
            0.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError("alpha is out of range", seen=alpha, allowed="0 to 1", field="alpha")
    columns = _columns(weights, act_max.shape[-1])
    act_large = class_max(act_max.float(), classes)
    heavy = class_max(columns, classes).clamp(min=_FLOOR)
    scales = (act_large.pow(alpha) / heavy.pow(1 - alpha)).clamp(min=_FLOOR)
    return torch.where(act_large <= _FLOOR, torch.ones_like(scales), scales) if keep_dead else scales


def search_smoothing(
    weights: Sequence[torch.Tensor],
    x: torch.Tensor,
    *,
    act_max: torch.Tensor | None = None,
    static: bool = False,
    group: int = 0,
    classes: torch.Tensor | None = None,
) -> Scaling:
    """The scales whose alpha, their exponent, leaves the least error of the W8A8 products of ``weights``
    [N, K] with ``x`` [T, K].

    Args:
        x: a sample of the input; some hundred tokens are enough.
        act_max: [K] of all of calibration; None: of ``x``.
        static: activations get one scale from ``act_max``, else each token has its own.
        group: so many neighbouring channels of a token have a scale of their own; 0: all share one.
        classes: channels that share a scale (channel_folding.py).
    """
    _columns(weights, x.shape[1])
    x = x.float()
    act_max = x.abs().amax(0) if act_max is None else act_max.to(x)
    wide = [weight.to(x) for weight in weights]
    exact = [x @ weight.T for weight in wide]

    def error(scales: torch.Tensor) -> float:
        quiet = x / scales
        near = fake_per_tensor(quiet, (act_max / scales).amax()) if static else fake_per_token(quiet, group)
        distances = [
            (near @ fake_per_channel(weight * scales).T - y).square().double().sum()
            for weight, y in zip(wide, exact, strict=True)
        ]
        return float(torch.stack(distances).sum()) / x.shape[0]

    tried = ((alpha, smoothing_scales(act_max, wide, alpha, classes=classes)) for alpha in ALPHAS)
    return best_scaling(act_max, tried, error)


def fake_per_token(x: torch.Tensor, group: int = 0) -> torch.Tensor:
    """x [..., K] as int8 with one scale, max|x| / 127, per token (and ``group`` of channels) holds it."""
    if group:
        return fake_per_token(x.unflatten(-1, (-1, group))).flatten(-2)
    return _fake(x, x.float().abs().amax(-1, keepdim=True))


def fake_per_tensor(x: torch.Tensor, absmax: torch.Tensor | float | None = None) -> torch.Tensor:
    """x as int8 with one scale, ``absmax`` / 127 (None: of x itself), holds it; cut to -128 … 127."""
    peak = x.float().abs().amax() if absmax is None else torch.as_tensor(absmax, device=x.device)
    return _fake(x, peak)


def fake_per_channel(weight: torch.Tensor) -> torch.Tensor:
    """W [N, K] as int8 with a scale for each row holds it."""
    return _fake(weight, weight.float().abs().amax(-1, keepdim=True))


def _fake(x: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    scale = peak.float().clamp(min=_FLOOR) / MOST
    return (x.float() / scale).round_().clamp_(LEAST, MOST).mul_(scale).to(x.dtype)


def _columns(weights: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """max|w_j| over the rows of all weights, [K] fp32."""
    widths = [weight.shape[-1] for weight in weights]
    if not weights or any(width != size for width in widths):
        raise ConfigError("weights and activations have different widths", seen=widths, allowed=size)
    return torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
