"""What the machine can do: devices, dtypes and their names.

Owns the translation between the words of a user (``auto``, ``cuda``, ``fp16``) and torch's objects. Knows no
model.

    device = resolve_device("auto")
"""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from ingot.errors import ConfigError, DeviceError

DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_E4M3_SINCE = (8, 9)  # compute capability
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_LONG_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}


def resolve_device(name: str | torch.device) -> torch.device:
    """The device behind ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; ``auto`` is the first GPU, else the CPU.

    Raises:
        DeviceError: the name is unknown, or CUDA was asked for and there is none.
    """
    if isinstance(name, torch.device):
        name = str(name)
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise DeviceError("unknown device", seen=name, allowed="auto, cpu, cuda, cuda:N", fix="--device")
    if not torch.cuda.is_available():
        raise DeviceError("there is no CUDA device that PyTorch can use", seen=name, fix="--device cpu")
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise DeviceError(
            "no such GPU",
            seen=name,
            allowed=f"cuda:0 to cuda:{torch.cuda.device_count() - 1}",
            fix="--device",
        )
    return torch.device("cuda", number)


def expect_e4m3(device: torch.device) -> None:
    """Raise unless a KV cache in fp8 can be on ``device``: a CPU, or a GPU that converts e4m3.

    Raises:
        DeviceError: the GPU's compute capability is below 8.9.
    """
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _E4M3_SINCE:
        raise DeviceError(
            "this GPU does not have the numbers of a KV cache in fp8",
            seen="compute capability {}.{}".format(*found),
            allowed="{}.{} or later".format(*_E4M3_SINCE),
            fix="--kv-dtype int8 (kv_dtype=)",
        )


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(_CGROUP_LIMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no control group, or "max"
        return total
    return min(total, limit)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A block in which a GPU is the current one; nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype of ``fp16``, ``bf16`` or ``fp32`` (torch's own names, and its dtypes, work too).

    Raises:
        ConfigError: the name is none of these.
    """
    name = str(name).removeprefix("torch.")
    dtype = DTYPES.get(_LONG_NAMES.get(name, name))
    if dtype is None:
        raise ConfigError(
            "unknown dtype", seen=name, allowed="auto, fp16, bf16, fp32", fix="--dtype (dtype=)"
        )
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``fp16``, ``bf16``, ``fp32``; torch's name for others."""
    for name, value in DTYPES.items():
        if value == dtype:
            return name
    return str(dtype).removeprefix("torch.")


def cpu_name() -> str | None:
    """The CPU's name as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
