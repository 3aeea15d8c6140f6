"""One kernel on inputs of one shape, beside PyTorch's way of doing the same.

Owns the description of a case and the random inputs that cases are made of. Knows no kernel.

    inputs = Inputs(device, torch.float16, beyond_l2(device))
    weights = inputs.rotating(12288, 4096)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.bench.graph_timer import Call

_L2_TIMES = 4  # a rotation walks over this many times the L2 cache
_LEAST_COPIES, _MOST_COPIES = 2, 1024
_LEAST_CALLS = 24


@dataclass(frozen=True)
class Effort:
    """What one call of a case has to do at least.

    Attributes:
        rows: tokens or requests of the call.
        num_bytes: read and written.
        flops: operations.
        cached: every call takes the same inputs, which the L2 cache then serves, as it serves a decode step's
            activations.
        compute_bound: its ceiling is the matrix product's, not the memory's.
        note: what the two sides do not have in common.
    """

    op: str
    shape: str
    rows: int
    num_bytes: float
    flops: float
    cached: bool = False
    compute_bound: bool = False
    note: str = ""


@dataclass(frozen=True)
class Case:
    """An effort and two ways to it, which launch it on inputs number i; a graph has ``calls`` of them."""

    effort: Effort
    ours: Call
    torch: Call
    calls: int


class Inputs:
    """Random tensors of one dtype on one device, in so many copies that they take ``footprint`` bytes, and at
    least two: the end of one is not in the L2 cache any more when its turn comes again.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, footprint: int) -> None:
        self.device, self.dtype = device, dtype
        self._footprint = footprint

    @property
    def cache_bytes(self) -> int:
        """Bytes that may be taken to stay in the L2 cache between two calls."""
        return self._footprint // _L2_TIMES

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        """Normally distributed numbers."""
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=std)

    def copies(self, num_values: int, most: int = _MOST_COPIES) -> int:
        """How many tensors of so many values a rotation needs, at most ``most``: each is a graph's call."""
        wanted = -(-self._footprint // (num_values * self.dtype.itemsize))
        return max(_LEAST_COPIES, min(most, wanted))

    def rotating(self, *shape: int, std: float = 0.02) -> torch.Tensor:
        """[copies, *shape]: weights or caches to take in turn."""
        count = self.copies(torch.Size(shape).numel())
        return self.normal(count, *shape, std=std)

    def long(self, values: torch.Tensor) -> torch.Tensor:
        """Indices on the device."""
        return values.to(device=self.device, dtype=torch.int64)


def beyond_l2(device: torch.device) -> int:
    """Bytes that a GPU's L2 cache cannot hold by far."""
    return _L2_TIMES * int(torch.cuda.get_device_properties(device).L2_cache_size)


def calls_for(copies: int) -> int:
    """Calls of a graph that takes ``copies`` in turn: each at least once."""
    return max(copies, _LEAST_CALLS)
