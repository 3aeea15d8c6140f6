"""What a measurement was taken on, and how much memory it took.

Owns the names and versions that stand beside every figure, and the reading of peaks. Knows nothing of models.

    machine(torch.device("cuda"))["gpu"]
    forget_peak(device); ...; peak_bytes(device)
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ingot
from ingot.device import cpu_name
from ingot.measure.side.freed_memory import free_memory
from ingot.version import VERSION, version_of

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def machine(device: torch.device) -> dict[str, Any]:
    """CPU, versions of what computes, Ingot's commit where there is one; of a GPU name, memory and driver.
    Unknown values are None.
    """
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_threads_used": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "ingot": VERSION,
        "commit": commit(Path(ingot.__file__).parent),
    }
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "gpu": properties.name,
        "gpu_memory_gb": round(properties.total_memory / 1e9, 1),
        "gpu_multiprocessors": properties.multi_processor_count,
        "gpu_l2_mb": round(properties.L2_cache_size / 1e6, 1),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def commit(folder: Path) -> str | None:
    """The git commit that a source folder is at, ``+`` behind it when files under it have changed since; None
    where no repository tracks it (a copy, an installed package).
    """
    found = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    tracked = _output("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py")
    if found is None or tracked is None:
        return None
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no", ".")
    return found + ("+" if changed else "")


def _driver() -> str | None:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def _output(*words: str) -> str | None:
    """What a program prints; None where it is absent or fails."""
    if shutil.which(words[0]) is None:
        return None
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        weights: of all parameters.
        cache: of the keys and values.
        peak: the most that was taken at once: of a GPU's memory by tensors, on a CPU by the whole process,
            libraries included; None where it is unknown.
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
    found = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return None if found is None else int(found) * 1024


def forget_peak(device: torch.device) -> None:
    """Give back what nothing holds any more, and count the peak from here."""
    free_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        with suppress(OSError):  # a kernel that does not allow it counts on from the process's beginning
            _RESET.write_text("5", encoding="ascii")


def gpu_peak(device: torch.device) -> dict[str, float]:
    """``peak_gpu_gb`` on a GPU, in units of 1e9 bytes."""
    return {"peak_gpu_gb": round((peak_bytes(device) or 0) / 1e9, 3)} if device.type == "cuda" else {}
