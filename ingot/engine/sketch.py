"""Checksums of activations: norm, mean, and projections on random vectors whose signs follow from a name.

The projections are a Johnson-Lindenstrauss sketch of the activation with every token divided by its root mean
square, so that no token outweighs the others: p_j = sum_t s_jt (r_j · u_t) / sqrt(T H), signs s and r of mean
0 and variance 1. The root mean square of the differences of eight such numbers estimates ‖U - U'‖ / ‖U‖, with
a spread of about a quarter. Norm and mean are of the activation as it is.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

from ingot.config.json_config import JsonConfig

NUM_PROJECTIONS = 8
_DIGITS = 9
_ROUND = 256  # lengths of rows of signs, so that most calls find theirs in the cache
_TINY = 1e-30
OVERFLOW = 1e30  # a distance from values that are not finite


@dataclass(frozen=True)
class Checksum(JsonConfig):
    """An activation [count, size] as its L2 norm, its mean and its projections."""

    count: int
    size: int
    norm: float
    mean: float
    projections: tuple[float, ...]


class Sketch:
    """Adds up a checksum token by token; fp64 sums on the device of the rows."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count, self._size = 0, 0
        self._square, self._sum = 0.0, 0.0
        self._projections = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64)

    def add(self, rows: torch.Tensor, first: int) -> Sketch:
        """Add rows [T, H] of tokens ``first`` and on; returns itself."""
        wide = rows.double()
        count, size = wide.shape
        channels = signs(f"{self._name}/channels", size).to(wide.device)
        enough = -(-(first + count) // _ROUND) * _ROUND
        tokens = signs(f"{self._name}/tokens", enough)[:, first : first + count].to(wide.device)
        projected = (tokens.T * (token_normed(wide) @ channels.T)).sum(0)
        self._projections += projected.cpu()
        self._square += float(wide.square().sum())
        self._sum += float(wide.sum())
        self._count, self._size = self._count + count, size
        return self

    def checksum(self) -> Checksum:
        """Rounded to nine digits."""
        values = max(self._count * self._size, 1)
        scaled = (self._projections / math.sqrt(values)).tolist()
        return Checksum(
            self._count,
            self._size,
            rounded(math.sqrt(self._square)),
            rounded(self._sum / values),
            tuple(map(rounded, scaled)),
        )


def token_normed(rows: torch.Tensor) -> torch.Tensor:
    """Rows [T, H], each divided by its root mean square; rows of zeros stay."""
    return rows / rows.square().mean(-1, keepdim=True).sqrt().clamp(min=_TINY)


def deviation(ours: Checksum, theirs: Checksum) -> float:
    """About the relative L2 distance of two activations; ``OVERFLOW``: shapes differ, or not finite."""
    if (ours.count, ours.size) != (theirs.count, theirs.size):
        return OVERFLOW
    pairs = zip(ours.projections, theirs.projections, strict=True)
    sketched = math.sqrt(sum((a - b) ** 2 for a, b in pairs) / NUM_PROJECTIONS)
    scale = max(theirs.norm, _TINY)
    in_norm = abs(ours.norm - theirs.norm) / scale
    in_mean = abs(ours.mean - theirs.mean) * math.sqrt(ours.count * ours.size) / scale
    found = (sketched, in_norm, in_mean)
    return max(found) if all(map(math.isfinite, found)) else OVERFLOW


def distance(rows: torch.Tensor, exact: torch.Tensor) -> float:
    """What ``deviation`` estimates, of full activations [T, H]: the larger of ‖X - Y‖ / ‖Y‖ before and after
    dividing every token by its root mean square; ``OVERFLOW`` where values are not finite.
    """
    a, b = rows.double(), exact.double()
    return max(_relative(a, b), _relative(token_normed(a), token_normed(b)))


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    value = float((a - b).norm() / b.norm().clamp(min=_TINY))
    return value if math.isfinite(value) else OVERFLOW


@functools.lru_cache(maxsize=16)
def signs(name: str, count: int) -> torch.Tensor:
    """[NUM_PROJECTIONS, count] of +1 and -1, float64, the bits of SHAKE-256(name): the same everywhere, and a
    longer row begins with the shorter one.
    """
    rows = []
    for index in range(NUM_PROJECTIONS):
        data = hashlib.shake_256(f"{name}/{index}".encode()).digest(-(-count // 8))
        rows.append(np.unpackbits(np.frombuffer(data, dtype=np.uint8))[:count])
    return torch.from_numpy(np.stack(rows)).double() * 2 - 1


def rounded(value: float) -> float:
    """A number to nine significant digits, as it is stored."""
    return float(f"{value:.{_DIGITS}g}")
