"""How fast this machine reads memory and multiplies matrices at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ingot.device import dtype_name, on_device
from ingot.kernels.product.few_rows.small_linear import small_linear

_GPU_READ_BYTES, _CPU_READ_BYTES = 4 << 30, 256 << 20  # far beyond the caches
_GPU_SIZE, _CPU_SIZE = 8192, 1024
_GPU_WARM_UP_S = 0.15  # clocks rise with the first work, and fall when power runs short: a rate that lasts
_LEAST_WARM_UP = 2
_WIDTH = 4096


@dataclass(frozen=True)
class Ceiling:
    """The fastest of several runs, once the clocks are steady.

    Attributes:
        read_gb_s: 1e9 bytes per second, of the fastest way to read.
        reads: of each way: ``amax`` (PyTorch's reduction) and, on a GPU, ``product`` (Ingot's matrix-vector
            product, some percent faster).
        matmul_tflop_s: 1e12 operations per second (2 n^3 per product) of a square product of ``dtype``.
        read_bytes, matmul_size: the sizes of the two.
    """

    read_gb_s: float
    matmul_tflop_s: float
    dtype: str
    read_bytes: int
    matmul_size: int
    reads: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_ceiling(device: torch.device, dtype: torch.dtype, repeats: int = 20) -> Ceiling:
    """Measure both, in up to 4.3 GB of a GPU or 0.3 GB of a CPU."""
    gpu = device.type == "cuda"
    num_bytes, size = (_GPU_READ_BYTES, _GPU_SIZE) if gpu else (_CPU_READ_BYTES, _CPU_SIZE)
    with on_device(device):
        if gpu:
            num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 2)
        rates = _read_rates(num_bytes, device, repeats)
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # zeros run faster
        matmul = 2 * size**3 / _seconds(lambda: a @ b, device, repeats)
        if gpu:
            del a, b
            torch.cuda.empty_cache()
    reads = {way: round(rate / 1e9, 1) for way, rate in rates.items()}
    best = max(reads.values())
    return Ceiling(best, round(matmul / 1e12, 3), dtype_name(dtype), num_bytes, size, reads)


def _read_rates(num_bytes: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Bytes per second of each way to read."""
    numbers = torch.arange(num_bytes // 4, dtype=torch.int32, device=device)
    rates = {"amax": num_bytes / _seconds(lambda: torch.amax(numbers), device, repeats)}
    if device.type == "cuda":
        rows = num_bytes // 2 // (2 * _WIDTH)  # half of it: the kernel's indices have 32 bits
        weight = numbers.view(torch.float16)[: rows * _WIDTH].view(rows, _WIDTH)
        x = torch.randn(1, _WIDTH, device=device, dtype=torch.float16)
        rates["product"] = weight.nbytes / _seconds(lambda: small_linear(x, weight), device, repeats)
    return rates


def _seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The shortest time of a call, after warm-up."""
    stop = time.perf_counter() + (_GPU_WARM_UP_S if device.type == "cuda" else 0.0)
    calls = 0
    while calls < _LEAST_WARM_UP or time.perf_counter() < stop:
        _one(call, device)
        calls += 1
    return min(_one(call, device) for _ in range(repeats))


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
