"""One kernel on inputs of one shape, beside PyTorch's way of doing the same.

Owns the description of a case, the random inputs that cases are made of, and their times in a CUDA graph.
Knows no kernel.

    inputs = Inputs(device, torch.float16, beyond_l2(device))
    weights = inputs.rotating(12288, 4096)
    times = graph_us(lambda i: op(weights[i % 8]), calls=24)      # µs of one call, one value a replay
"""

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
class KernelCase:
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
        return values.to(device=self.device, dtype=torch.int64)


def beyond_l2(device: torch.device) -> int:
    """Bytes that a GPU's L2 cache cannot hold by far."""
    return _L2_TIMES * int(torch.cuda.get_device_properties(device).L2_cache_size)


def calls_for(copies: int) -> int:
    """Calls of a graph that takes ``copies`` in turn: each at least once."""
    return max(copies, _LEAST_CALLS)


def graph_us(call: Call, calls: int) -> list[float]:
    """Microseconds of one call, averaged over the graph's ``calls``; one value a replay.

    ``call(i)`` launches the work on inputs number i.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels and makes workspaces outside of the capture
        call(0)
        call(calls - 1)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    measure = GraphTimer().prepare([partial(call, i) for i in range(calls)])
    return [measure() for _ in range(REPLAYS)]
