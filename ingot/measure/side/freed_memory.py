"""Memory between one model and the next.

Owns what gives memory back, how a lack of it differs from other errors, and how long a model took to come.
Knows no model.

    del model; free_memory()
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ingot.errors import OutOfMemoryError


def free_memory() -> None:
    """Give back what a model that is gone held, on a GPU to the last byte."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds_since(start: float, device: torch.device) -> float:
    """Of ``time.perf_counter``, once a GPU has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def lacks_memory(error: Exception) -> bool:
    """Whether an error is about memory; PyTorch has no type of its own for a CPU's."""
    kinds = (OutOfMemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


@contextmanager
def gpu_memory(what: str, fix: str) -> Iterator[None]:
    """Says what does not fit where a GPU's memory is too small, and what takes less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"{what} the GPU's memory"
        raise OutOfMemoryError(what, seen=str(error).split(". ")[0], fix=fix) from None
