"""A kernel on random inputs of one shape beside PyTorch's operators, both timed in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ingot.building.tuner.kernel_timing import GraphTimer

Call = Callable[[int], object]
REPLAYS = 20
_L2_TIMES = 4  # a rotation walks over this many times the L2 cache
_LEAST_COPIES, _MOST_COPIES = 2, 1024
_LEAST_CALLS = 24


@dataclass(frozen=True)
class Effort:
    """The least work of one call.

    Attributes:
        rows: tokens or requests of the call.
        num_bytes: read and written.
        flops: operations.
        cached: every call takes the same inputs, from the L2 cache, as a decode step's activations.
        compute_bound: its ceiling is the matrix product's, not the memory's.
        note: how the two sides differ.
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
class KernelCase:
    """An effort and two calls that do it on inputs number i; a graph has ``calls`` of them."""

    effort: Effort
    ours: Call
    torch: Call
    calls: int


class Inputs:
    """Random tensors of one dtype on one device, in at least two copies of ``footprint`` bytes in total, so
    that a copy has left the L2 cache when its turn comes again.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, footprint: int) -> None:
        self.device, self.dtype = device, dtype
        self._footprint = footprint

    @property
    def cache_bytes(self) -> int:
        """Bytes that stay in the L2 cache between two calls."""
        return self._footprint // _L2_TIMES

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=std)

    def copies(self, num_values: int, most: int = _MOST_COPIES) -> int:
        """The tensors of ``num_values`` values that a rotation needs, at most ``most``: each is a call."""
        wanted = -(-self._footprint // (num_values * self.dtype.itemsize))
        return max(_LEAST_COPIES, min(most, wanted))

    def rotating(self, *shape: int, std: float = 0.02) -> torch.Tensor:
        """[copies, *shape]: weights or caches to take in turn."""
        count = self.copies(torch.Size(shape).numel())
        return self.normal(count, *shape, std=std)

    def long(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(device=self.device, dtype=torch.int64)


def beyond_l2(device: torch.device) -> int:
    """Several times the bytes of a GPU's L2 cache."""
    return _L2_TIMES * int(torch.cuda.get_device_properties(device).L2_cache_size)


def calls_for(copies: int) -> int:
    """The calls of a graph that takes each of ``copies`` at least once."""
    return max(copies, _LEAST_CALLS)


def graph_us(call: Call, calls: int) -> list[float]:
    """Microseconds of one call, averaged over the graph's ``calls``; one value per replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels and makes workspaces outside the capture
        call(0)
        call(calls - 1)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    measure = GraphTimer().prepare([partial(call, i) for i in range(calls)])
    return [measure() for _ in range(REPLAYS)]
