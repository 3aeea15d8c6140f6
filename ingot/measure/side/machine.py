"""What a measurement was taken on, and how much memory it took."""

from __future__ import annotations

import os
import platform
import re
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
_NODES = Path("/sys/devices/system/node")


def machine(device: torch.device) -> dict[str, Any]:
    """CPU, memory, operating system, versions, Ingot's commit; of a GPU name, memory and driver. Unknown
    values are None; a gigabyte is 1e9 bytes.
    """
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_threads_used": torch.get_num_threads(),
        "numa_nodes": numa_nodes(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "os": operating_system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "ingot": VERSION,
        "commit": commit(Path(ingot.__file__).parent),
    }
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found | {
        "gpu": properties.name,
        "gpu_memory_gb": round(properties.total_memory / 1e9, 1),
        "gpu_multiprocessors": properties.multi_processor_count,
        "gpu_l2_mb": round(properties.L2_cache_size / 1e6, 1),
        "cuda": torch.version.cuda,
        "driver": driver.splitlines()[0].strip() if driver else None,
    }


def numa_nodes(folder: Path = _NODES) -> int | None:
    """Number of the machine's NUMA nodes; None outside Linux. Memory of another node is slower to reach."""
    return sum(re.fullmatch(r"node\d+", one.name) is not None for one in folder.glob("node*")) or None


def operating_system() -> str:
    """Distribution, kernel and its release: "Debian GNU/Linux 12 (bookworm), Linux 6.1.0"."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except OSError:  # not Linux, or no os-release
        return kernel


def commit(folder: Path) -> str | None:
    """A source folder's git commit, with ``+`` if files under it have changed since; None if no repository
    tracks it (a copy, an installed package).
    """
    found = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    tracked = _output("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py")
    if found is None or tracked is None:
        return None
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no", ".")
    return found + ("+" if changed else "")


def _output(*words: str) -> str | None:
    """A program's output; None if it is absent or fails."""
    if shutil.which(words[0]) is None:
        return None
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(frozen=True)
class Memory:
    """Bytes of parameters, of the KV cache, and the peak: of a GPU's tensors, on a CPU of the whole process;
    None if unknown.
    """

    weights: int
    cache: int
    peak: int | None

    def to_json(self) -> dict[str, float | None]:
        """In units of 1e9 bytes."""
        values = {"weights_gb": self.weights, "cache_gb": self.cache, "peak_gb": self.peak}
        return {name: None if value is None else round(value / 1e9, 6) for name, value in values.items()}


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory since ``forget_peak``; None on a CPU outside Linux."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not _STATUS.exists():
        return None
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    found = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return None if found is None else int(found) * 1024


def forget_peak(device: torch.device) -> None:
    """Free unused memory, and count the peak from here."""
    free_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        with suppress(OSError):  # not allowed by every kernel
            _RESET.write_text("5", encoding="ascii")


def gpu_peak(device: torch.device) -> dict[str, float]:
    """``peak_gpu_gb`` on a GPU, in units of 1e9 bytes."""
    return {"peak_gpu_gb": round((peak_bytes(device) or 0) / 1e9, 3)} if device.type == "cuda" else {}
