"""How far two tensors are apart, and what each looks like."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Difference:
    """``got`` against ``expected``, both [T, channels].

    Attributes:
        max_abs: the largest difference.
        relative: root of the mean over tokens of (‖got - expected‖ / ‖expected‖)². Every token weighs the
            same: one of huge norm, often the first, does not hide the others.
        cosine: mean over tokens.
        token, channel: where the largest difference is.
    """

    max_abs: float
    relative: float
    cosine: float
    token: int
    channel: int


@dataclass(frozen=True)
class LogitsDifference:
    """``top1``: share of tokens with the same likeliest id; ``kl``: mean KL(expected ‖ got) in nats."""

    top1: float
    kl: float


@dataclass(frozen=True)
class Statistics:
    shape: tuple[int, ...]
    dtype: str
    mean: float
    std: float
    min: float
    max: float


def measure(expected: torch.Tensor, got: torch.Tensor) -> Difference:
    """Compares in fp64; NaN or infinity on one side alone is an infinite difference."""
    a, b = expected.flatten(1).double(), got.flatten(1).double()
    if a.shape != b.shape:
        return Difference(math.inf, math.inf, 0.0, 0, 0)
    gap = (b - a).abs()
    gap = torch.where(a == b, torch.zeros_like(gap), gap).nan_to_num(math.inf, math.inf)
    tiny = torch.finfo(torch.float32).tiny
    norms = a.norm(dim=1)
    relative = (gap.norm(dim=1) / norms.clamp(min=tiny)).square().mean().sqrt()
    cosine = ((a * b).sum(1) + tiny) / (norms * b.norm(dim=1) + tiny)
    where = int(gap.argmax())
    width = gap.shape[1]
    mean_cosine = float(cosine.mean().nan_to_num(0.0))
    return Difference(float(gap.max()), _number(relative), mean_cosine, where // width, where % width)


@dataclass(frozen=True)
class Common:
    """By how much many values are off in common, and its standard deviation if errors are independent."""

    off: float
    noise: float


def common_factors(
    expected: torch.Tensor, got: torch.Tensor, floor: float, heads: int = 1
) -> Iterator[Common]:
    """How far each head's common factor is from 1; ``floor`` is the relative L2 of the values' own errors."""
    a, error, own = _by_head(expected, got, floor, heads)
    yield from _common((error * a).sum((0, 2)), (own * a).square().sum((0, 2)), a.square().sum((0, 2)))


def at_least(tests: Iterable[Common], noise: float) -> Iterator[Common]:
    for one in tests:
        yield replace(one, noise=max(one.noise, noise))


def rms(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares))


def common_turns(
    expected: torch.Tensor, got: torch.Tensor, floor: float, heads: int, width: int
) -> Iterator[Common]:
    """The angle, in radians, of each pair of rotated channels, over all heads and tokens."""
    a, error, own = (part[..., :width].chunk(2, dim=-1) for part in _by_head(expected, got, floor, heads))
    across = (a[0] * error[1] - a[1] * error[0]).sum((0, 1))
    noise = ((own[0] * a[1]).square() + (own[1] * a[0]).square()).sum((0, 1))
    yield from _common(across, noise, (a[0].square() + a[1].square()).sum((0, 1)))


def _by_head(
    expected: torch.Tensor, got: torch.Tensor, floor: float, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The expected values, their errors and the errors that they may have, [T, heads, size] in fp64."""
    a, b = expected.flatten(1).double(), got.flatten(1).double()
    usual = a.square().mean(1, keepdim=True).sqrt()
    parts = (a, b - a, floor * torch.maximum(a.abs(), usual))
    found = [part.unflatten(1, (heads, -1)) for part in parts]
    return found[0], found[1], found[2]


def _common(off: torch.Tensor, variance: torch.Tensor, size: torch.Tensor) -> Iterator[Common]:
    size = size.clamp(min=torch.finfo(torch.float32).tiny)
    for one in torch.stack([(off / size).abs(), variance.sqrt() / size], dim=-1):
        yield Common(_number(one[0]), _number(one[1]))


def measure_logits(expected: torch.Tensor, got: torch.Tensor) -> LogitsDifference:
    """Top-1 agreement and KL divergence of two [T, vocab_size] tensors."""
    p, q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return LogitsDifference(float((p.argmax(-1) == q.argmax(-1)).double().mean()), max(_number(kl), 0.0))


def statistics(tensor: torch.Tensor) -> Statistics:
    values = tensor.double()
    return Statistics(
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        float(values.mean()),
        float(values.std(correction=0)),
        float(values.min()),
        float(values.max()),
    )


def _number(value: torch.Tensor) -> float:
    found = float(value)
    return math.inf if math.isnan(found) else found
