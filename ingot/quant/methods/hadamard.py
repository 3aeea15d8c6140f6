"""An orthogonal rotation, fixed by a dimension's size, that spreads channel outliers over all channels.

With K = 2^p · m, m odd, R = D · (H ⊗ C): D has a sign for each channel, H = Sylvester's Hadamard matrix /
√(2^p), C[j, k] = (cos(2π jk / m) + sin(2π jk / m)) / √m, which is symmetric and its own inverse. No value of
R is larger than √(2 / K), or √(1 / K) where K is a power of two: a channel goes to all others alike. QuaRot
(arXiv 2404.00456) uses known Hadamard matrices of sizes 12, 20, 28 … and random signs; here every size works
by one rule, and signs come from the channel's number, so that a build is the same each time, on any machine.

A Hadamard transform is sums and differences, in one order, in fp32: the same bits on a CPU and a GPU. While
it is made, channels are the slow dimension, so that every sum is of long runs of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch

_CPU_PIECE = 1 << 16  # values that are rotated at once: what stays in a core's cache, for each thread
_PIECE = 1 << 25  # on another device


def rotate(x: torch.Tensor, dim: int = -1, factors: torch.Tensor | None = None) -> torch.Tensor:
    """x · R for x [..., K], or for another ``dim`` of size K, its place taken: fp32 (fp64 for fp64), on the
    device of x. ``factors`` [K] multiply the channels before.
    """
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    turned = torch.empty(x.shape, dtype=kind, device=x.device)
    if not x.numel():
        return turned
    size = x.shape[dim]
    flip = signs(size, kind, x.device)
    before = (flip if factors is None else factors.to(flip) * flip)[:, None]
    scale = (odd_part(size) / size) ** 0.5
    work: _Work | None = None
    for source, target in zip(_pieces(x, dim), _pieces(turned, dim), strict=True):
        if work is None or work.width != source.shape[1]:
            work = _Work(size, source.shape[1], kind, x.device)
        torch.mul(source, before, out=work.first)
        torch.mul(work.turned(), scale, out=target)
    return turned


@lru_cache(maxsize=8)
def signs(size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """[size] of 1 and -1: the highest bit of a multiple of the channel's squared number.

    Without them a row of equal values, which H has itself, would become one outlier channel.
    """
    index = torch.arange(size, dtype=torch.int64)
    bits = (index * (index + 1) // 2 * 0x9E3779B1 >> 31) & 1  # 2^32 over the golden ratio
    return (1.0 - 2.0 * bits.float()).to(device, dtype)


def odd_part(size: int) -> int:
    """m of size = 2^p · m."""
    return size // (size & -size)


@lru_cache(maxsize=8)
def _hartley(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """C, [size, size], computed on the CPU: the same values on any device."""
    index = torch.arange(size, dtype=torch.float64)
    angles = (index[:, None] * index).remainder(size) * (2 * math.pi / size)
    return ((angles.cos() + angles.sin()) / math.sqrt(size)).to(device, dtype)


def _pieces(x: torch.Tensor, dim: int) -> Iterator[torch.Tensor]:
    """Views [K, width] of which ``x`` consists."""
    size, dim = x.shape[dim], dim % x.dim()
    inner = math.prod(x.shape[dim + 1 :])
    whole = x.reshape(-1, size, inner)
    piece = _CPU_PIECE * torch.get_num_threads() if x.device.type == "cpu" else _PIECE
    most = max(1, piece // size)
    for part in whole.permute(2, 1, 0) if inner == 1 else whole:
        yield from part.split(most, dim=1)


class _Work:
    """Two buffers for pieces [K, width], and the sums and differences between them."""

    def __init__(self, size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = width
        self._odd = odd_part(size)
        self._even = size // self._odd
        self.first, other = torch.empty((2, size, width), dtype=dtype, device=device).unbind()
        self._last, self._spare = self.first, other
        self._steps: list[tuple[torch.Tensor, ...]] = []
        reach = 1
        while reach < self._even:
            pairs = (self._even // (2 * reach), 2, reach * self._odd * width)
            self._steps.append((*self._last.view(pairs).unbind(1), *self._spare.view(pairs).unbind(1)))
            self._last, self._spare = self._spare, self._last
            reach *= 2

    def turned(self) -> torch.Tensor:
        """``first`` [K, width] times H ⊗ C without Hadamard's factor, in one of the buffers."""
        for a, b, total, difference in self._steps:
            torch.add(a, b, out=total)
            torch.sub(a, b, out=difference)
        if self._odd == 1:
            return self._last
        # C times the odd part of the channels, summed in one order.
        matrix = _hartley(self._odd, self.first.dtype, self.first.device)[:, :, None]  # [m, m, 1]
        x = self._last.view(self._even, self._odd, self.width)
        total = self._spare.view_as(x)
        torch.mul(x[:, :1], matrix[0], out=total)
        for column in range(1, self._odd):
            total += x[:, column : column + 1] * matrix[column]
        return self._spare
