"""How much memory a side takes.

Owns the reading of peaks. Knows no side.

    forget_peak(device); ...; peak_bytes(device)
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.compare.memory import free_memory

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        weights: of all parameters.
        cache: of the keys and values.
        peak: the most that was taken at once: of a GPU's memory by tensors, on a CPU by the whole process,
            libraries included; None where it is not told.
    """

    weights: int
    cache: int
    peak: int | None

    def to_json(self) -> dict[str, float | None]:
        """In units of 1e9 bytes."""
        peak = None if self.peak is None else round(self.peak / 1e9, 6)
        return {
            "weights_gb": round(self.weights / 1e9, 6),
            "cache_gb": round(self.cache / 1e9, 6),
            "peak_gb": peak,
        }


def peak_bytes(device: torch.device) -> int | None:
    """The most memory taken since ``forget_peak``; None on a CPU beyond Linux."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not _STATUS.exists():
        return None
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    told = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return None if told is None else int(told) * 1024


def forget_peak(device: torch.device) -> None:
    """Give back what nothing holds any more, and count the peak from here."""
    free_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        with suppress(OSError):  # a kernel that does not allow it counts on from the process's beginning
            _RESET.write_text("5", encoding="ascii")
