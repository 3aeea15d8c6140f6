"""Freeing a model's memory, and recognising a lack of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ingot.errors import OutOfMemoryError


def free_memory() -> None:
    """Give back the memory of a deleted model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds_since(start: float, device: torch.device) -> float:
    """Seconds since ``start`` of ``time.perf_counter``, once a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def lacks_memory(error: Exception) -> bool:
    """Whether an error is about memory; PyTorch has no type for a CPU's."""
    kinds = (OutOfMemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


@contextmanager
def gpu_memory(what: str, fix: str) -> Iterator[None]:
    """Turn PyTorch's error of a full GPU into ours."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"{what} the GPU's memory"
        raise OutOfMemoryError(what, seen=str(error).split(". ")[0], fix=fix) from None
