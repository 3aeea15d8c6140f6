"""An orthogonal rotation that spreads loud channels over all others.

Owns the rotation of the last dimension by a matrix that is fixed by its size alone: signs, then a Hadamard
transform of the largest power of two, then Hartley's transform of what is left. Knows no layer, and not why
a rotation changes nothing (engine/rotated.py).

    turned = rotate(weight)              # weight · R, any [..., K]
    weight = rotate_back(turned)         # · Rᵀ

With K = 2^p · m, m odd, R = D · (H ⊗ C): D has a sign for each channel, H = Sylvester's Hadamard matrix /
√(2^p), C[j, k] = (cos(2π jk / m) + sin(2π jk / m)) / √m, which is symmetric and its own inverse. No value of
R is larger than √(2 / K), or √(1 / K) where K is a power of two: a channel goes to all others alike. QuaRot
(arXiv 2404.00456) uses known Hadamard matrices of sizes 12, 20, 28 … and random signs; here every size works
by one rule, and signs come from the channel's number, so that a build is the same each time, on any machine.

A Hadamard transform is sums and differences, in one order, in fp32: the same bits on a CPU and a GPU.
"""

from __future__ import annotations

import math

import torch

_PIECE = 1 << 16  # values that are turned at once: they stay in a CPU's cache


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x · R for x [..., K]: fp32 (fp64 for fp64), on its device."""
    return _in_pieces(x, forth=True)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """x · Rᵀ for x [..., K]."""
    return _in_pieces(x, forth=False)


def signs(size: int) -> torch.Tensor:
    """fp32 [size] of 1 and -1: the highest bit of a multiple of the channel's squared number.

    Without them a row of equal values, which H has itself, would become one loud channel.
    """
    index = torch.arange(size, dtype=torch.int64)
    bits = (index * (index + 1) // 2 * 0x9E3779B1 >> 31) & 1  # 2^32 over the golden ratio
    return 1.0 - 2.0 * bits.float()


def odd_part(size: int) -> int:
    """m of size = 2^p · m."""
    return size // (size & -size)


def hartley(size: int) -> torch.Tensor:
    """C, fp64 [size, size]."""
    index = torch.arange(size, dtype=torch.float64)
    angles = (index[:, None] * index).remainder(size) * (2 * math.pi / size)
    return (angles.cos() + angles.sin()) / math.sqrt(size)


def _in_pieces(x: torch.Tensor, *, forth: bool) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    rows = wide.reshape(-1, x.shape[-1])
    count = max(1, _PIECE // x.shape[-1])
    pieces = [_turned(piece, forth) for piece in rows.split(count)]
    return torch.cat(pieces).view(x.shape) if pieces else wide


def _turned(x: torch.Tensor, forth: bool) -> torch.Tensor:
    """[rows, K] times R or Rᵀ; both H and C are symmetric."""
    size = x.shape[1]
    odd = odd_part(size)
    flip = signs(size).to(x)
    y = x * flip if forth else x
    y = _hadamard(y.unflatten(1, (size // odd, odd)))
    if odd > 1:
        y = _mixed(y, hartley(odd).to(x))
    y = y.flatten(1) * (odd / size) ** 0.5
    return y if forth else y * flip


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """Sylvester's transform of the middle dimension [rows, 2^p, m], without the factor."""
    rows, size, rest = x.shape
    width = 1
    while width < size:
        a, b = x.view(rows, size // (2 * width), 2, width, rest).unbind(2)
        x = torch.stack((a + b, a - b), 2).view(rows, size, rest)
        width *= 2
    return x


def _mixed(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x · matrix of the last dimension, summed in one order."""
    total = x[..., :1] * matrix[0]
    for column in range(1, matrix.shape[0]):
        part = x[..., column : column + 1] * matrix[column]
        total = total + part
    return total
