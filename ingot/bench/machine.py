"""What a measurement was taken on.

Owns the names and versions that stand beside every figure. Knows nothing of models.

    machine(torch.device("cuda"))["gpu"]
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import ingot
from ingot.device import cpu_name
from ingot.version import VERSION, version_of


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
    told = _told("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    tracked = _told("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py")
    if told is None or tracked is None:
        return None
    changed = _told("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no", ".")
    return told + ("+" if changed else "")


def _driver() -> str | None:
    told = _told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return told.splitlines()[0].strip() if told else None


def _told(*words: str) -> str | None:
    """What a program prints; None where it is absent or fails."""
    if shutil.which(words[0]) is None:
        return None
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else None
