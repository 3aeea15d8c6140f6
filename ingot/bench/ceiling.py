"""How fast this machine can read and multiply at best.

Owns the two measurements that every figure is set beside: a reduction that only reads memory, and a large
matrix product. Knows no model.

    ceiling = measure_ceiling(torch.device("cuda"), torch.float16)
    ceiling.read_gb_s, ceiling.matmul_tflop_s
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ingot.bench.spread import median
from ingot.device import dtype_name, on_device

_GPU_READ_BYTES, _CPU_READ_BYTES = 4 << 30, 256 << 20  # far beyond the caches
_GPU_SIZE, _CPU_SIZE = 8192, 1024
_GPU_WARM_UP_S = 0.15  # clocks rise with the first work, and fall when power runs short: a rate that lasts
_LEAST_WARM_UP = 2


@dataclass(frozen=True)
class Ceiling:
    """The machine's best, median of several runs.

    Attributes:
        read_gb_s: 1e9 bytes a second that ``torch.amax`` reads.
        matmul_tflop_s: 1e12 operations a second (2 n^3 a product) of a square product of ``dtype``.
        read_bytes, matmul_size: how large the two were.
    """

    read_gb_s: float
    matmul_tflop_s: float
    dtype: str
    read_bytes: int
    matmul_size: int

    def to_json(self) -> dict[str, Any]:
        """The values by name."""
        return asdict(self)


def measure_ceiling(device: torch.device, dtype: torch.dtype, repeats: int = 20) -> Ceiling:
    """Measure both, once the machine has warmed up; a GPU lends 4.3 GB for a moment, a CPU 0.3 GB."""
    gpu = device.type == "cuda"
    num_bytes, size = (_GPU_READ_BYTES, _GPU_SIZE) if gpu else (_CPU_READ_BYTES, _CPU_SIZE)
    with on_device(device):
        if gpu:
            num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 2)
        read, matmul = _read_rate(num_bytes, device, repeats), _matmul_rate(size, device, dtype, repeats)
        if gpu:
            torch.cuda.empty_cache()
    return Ceiling(round(read / 1e9, 1), round(matmul / 1e12, 3), dtype_name(dtype), num_bytes, size)


def _read_rate(num_bytes: int, device: torch.device, repeats: int) -> float:
    """Bytes a second."""
    numbers = torch.arange(num_bytes // 4, dtype=torch.int32, device=device)
    return num_bytes / _seconds(lambda: torch.amax(numbers), device, repeats)


def _matmul_rate(size: int, device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """Operations a second, of random numbers: zeros take less power and run faster."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device, repeats)


def _seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of one call, after some that warm up."""
    stop = time.perf_counter() + (_GPU_WARM_UP_S if device.type == "cuda" else 0.0)
    calls = 0
    while calls < _LEAST_WARM_UP or time.perf_counter() < stop:
        _one(call, device)
        calls += 1
    return median([_one(call, device) for _ in range(repeats)])


def _one(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
