"""Random inputs for timing: enough of them that the L2 cache never serves a weight.

Owns one pool of random numbers that every case's weights and caches are views of. Knows no op.

    inputs = Inputs(torch.device("cuda"), torch.float16)
    weights = inputs.rotating(4096, 11008)
"""

from __future__ import annotations

import math

import torch

FOOTPRINT = 256 << 20  # bytes that a rotation walks over; the L2 of an H200 holds 60 MB
MOST_COPIES = 64
_ALIGNMENT = 128  # values; kernels load 16 bytes at a time


class Inputs:
    """Random tensors of one dtype on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, footprint: int = FOOTPRINT) -> None:
        self.device = device
        self.dtype = dtype
        self._footprint = footprint
        self._generator = torch.Generator(device).manual_seed(0)
        self._pool = torch.empty(0, device=device, dtype=dtype)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal activations."""
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)

    def rotating(self, *shape: int) -> list[torch.Tensor]:
        """Weights of std 0.02 in turn: so many that they are ``footprint`` bytes together, at least one, at
        most ``MOST_COPIES``. Different calls share memory.
        """
        size = math.prod(shape)
        step = -(-size // _ALIGNMENT) * _ALIGNMENT
        copies = min(max(-(-self._footprint // (step * self.dtype.itemsize)), 1), MOST_COPIES)
        if self._pool.numel() < copies * step:
            self._grow(copies * step)
        return [self._pool[i * step : i * step + size].view(shape) for i in range(copies)]

    def index(self, values: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers on the device."""
        return values.to(device=self.device, dtype=dtype)

    def _grow(self, size: int) -> None:
        """A larger pool; views handed out before keep the old one."""
        self._pool = torch.empty(size, device=self.device, dtype=self.dtype)
        self._pool.normal_(std=0.02, generator=self._generator)
