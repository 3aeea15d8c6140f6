"""Channel factors, moved from a product's input into what makes that input: x·Wᵀ = (x / s)·(W · s)ᵀ.

All results are fp32 (fp64 for fp64): what is quantized next is not rounded before, and what is stored in
16 bits is cast, with its check for overflow, by whoever stores it.

Channels that must share a factor are marked by ``classes`` [K] int64: the channels of one class are made by
the same row. ``value_rows`` gives those of attention with fewer heads of values than of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ingot.errors import ConfigError
from ingot.quant.methods.rounding import widened


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scales [K] fp32 of an input, and the exponent of what they are made of (0: all are 1).

    Errors are mean squared distances of outputs, with and without scaling.
    """

    scales: torch.Tensor
    exponent: float
    error: float
    plain_error: float


def best_scaling(
    like: torch.Tensor,
    candidates: Iterable[tuple[float, torch.Tensor]],
    error: Callable[[torch.Tensor], float],
) -> Scaling:
    """The candidate (exponent, scales) of least error, or no scaling; ``like`` has one value per channel."""
    ones = torch.ones_like(like)
    plain = error(ones)
    best = Scaling(ones, 0.0, plain, plain)
    for exponent, scales in candidates:
        found = error(scales)
        if found < best.error:
            best = Scaling(scales, exponent, found, plain)
    return best


def fold_into_norm(
    weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias [K] of a norm whose output is divided by ``scales`` [K]."""
    _check(scales, weight.shape[0])
    return widened(weight) / scales, None if bias is None else widened(bias) / scales


def fold_into_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [N, K] and bias [N] of a product whose outputs are divided by ``scales`` [N].

    Between that product and the next nothing but linear steps may lie: the values of attention, the up branch
    of a gated MLP; with positive scales a ReLU too, but no GELU.
    """
    _check(scales, weight.shape[0])
    return widened(weight) / scales[:, None], None if bias is None else widened(bias) / scales


def fold_into_columns(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weight [N, K] of the product that reads the divided channels: each column times its scale."""
    _check(scales, weight.shape[1])
    return widened(weight) * scales


def value_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """int64 [num_heads · head_dim]: the value product's row that makes each input of the output product."""
    heads = torch.arange(num_heads) // (num_heads // num_kv_heads)
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def class_max(values: torch.Tensor, classes: torch.Tensor | None) -> torch.Tensor:
    """Values [K], each the largest of its class."""
    return values if classes is None else _per_class(values, classes, "amax")[classes.to(values.device)]


def class_mean(values: torch.Tensor, classes: torch.Tensor | None) -> torch.Tensor:
    """Values [K], each the mean of its class."""
    return values if classes is None else _per_class(values, classes, "mean")[classes.to(values.device)]


def one_a_class(values: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Values [K], equal within a class, as one for each class: factors of the rows that make the channels."""
    return _per_class(values, classes, "amax")


def _per_class(values: torch.Tensor, classes: torch.Tensor, how: str) -> torch.Tensor:
    out = values.new_zeros(int(classes.max()) + 1)
    return out.scatter_reduce_(0, classes.to(values.device), values, how, include_self=False)


def _check(scales: torch.Tensor, size: int) -> None:
    if scales.shape != (size,):
        raise ConfigError("there must be one scale per channel", seen=list(scales.shape), allowed=[size])
    good = torch.isfinite(scales) & (scales > 0)
    if not bool(good.all()):
        channel = int((~good).nonzero()[0])
        seen = f"channel {channel}: {scales[channel]:g}"
        raise ConfigError("a channel's scale must be positive", seen=seen)
