"""Devices, dtypes and host memory, and the names by which users ask for them.

device = resolve_device("auto")
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.control_groups import PROC, affine_processors, group_folders, lines_of, usable_processors
from ingot.errors import ConfigError, DeviceError

DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_KERNELS_SINCE = (8, 0)  # compute capability: tensor cores of bfloat16, asynchronous copies
_E4M3_SINCE = (8, 9)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_log = logging.getLogger(__name__)
_LONG_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}


def resolve_device(name: str | torch.device) -> torch.device:
    """The device of ``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        DeviceError: the name is unknown, or there is no such GPU.
    """
    if isinstance(name, torch.device):
        name = str(name)
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise DeviceError("unknown device", seen=name, allowed="auto, cpu, cuda, cuda:N", field="device")
    if not torch.cuda.is_available():
        what = "PyTorch finds no usable CUDA device"
        raise DeviceError(what, seen=name, field="device", fix="`device=cpu`")
    number, count = int(index or 0), torch.cuda.device_count()
    if number >= count:
        raise DeviceError("no such GPU", seen=name, allowed=f"cuda:0 to cuda:{count - 1}", field="device")
    return torch.device("cuda", number)


def expect_capability(device: torch.device) -> None:
    """Raise ``DeviceError`` on a GPU that is too old for the kernels."""
    _expect_since(device, _KERNELS_SINCE, "this GPU is too old for Ingot's kernels", "device", "`device=cpu`")


def expect_e4m3(device: torch.device) -> None:
    """Raise ``DeviceError`` on a GPU that cannot convert e4m3, so cannot have a KV cache in fp8."""
    what = "this GPU does not support an fp8 KV cache"
    _expect_since(device, _E4M3_SINCE, what, "kv_dtype", "`kv_dtype=int8`")


def expect_fp8_products(device: torch.device, scheme: str) -> None:
    """Raise ``DeviceError`` on a GPU that cannot multiply e4m3, so cannot run layers in ``scheme``."""
    what = f"this GPU does not support fp8 products ({scheme})"
    _expect_since(device, _E4M3_SINCE, what, "quant", "build with `quant=w8a8` or `quant=w8a16`")


def _expect_since(device: torch.device, since: tuple[int, int], what: str, field: str, fix: str) -> None:
    """Raise ``DeviceError`` on a GPU with an older compute capability."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < since:
        raise DeviceError(
            what,
            seen="{}, compute capability {}.{}".format(torch.cuda.get_device_name(device), *found),
            allowed="{}.{} or later".format(*since),
            field=field,
            fix=fix,
        )


@functools.cache
def respect_quota() -> None:
    """Once in a process: where control groups allow it fewer processors than there are, PyTorch gets as many
    threads, which it does not see to itself, unless ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS`` is set.
    """
    most = usable_processors()
    limited = most < affine_processors() and not any(name in os.environ for name in _THREADS)
    if not limited or torch.get_num_threads() <= most:
        return
    _log.info("PyTorch uses %d CPU threads, as many as this process's quota allows", most)
    torch.set_num_threads(most)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of memory that this process may use.

    Attributes:
        name: the tightest bound: the machine's memory, a control group's limit, or a process limit.
        total: of that bound.
        available: what can still be taken without swapping; file caches count as free.
        held: what this process holds now, without mapped files.
    """

    name: str
    total: int
    available: int
    held: int


def host_memory(proc: Path = PROC) -> HostMemory:
    """What this process may use: the tightest of the machine's memory, the limits of its control groups (v1
    and v2, with their parents') and its own limits (``ulimit -v``, ``ulimit -d``).
    """
    own, memory = _kilobytes(proc / "self" / "status"), _kilobytes(proc / "meminfo")
    machine = memory.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bounds: list[_Bound] = [("this machine's memory", machine, memory.get("MemAvailable", machine))]
    bounds += _group_limits(proc)
    for what, which, size in (
        ("this process's address space (ulimit -v)", resource.RLIMIT_AS, "VmSize"),
        ("this process's data (ulimit -d)", resource.RLIMIT_DATA, "VmData"),
    ):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            bounds.append((what, limit, limit - own.get(size, 0)))
    name, total, available = min(bounds, key=lambda bound: bound[2])
    return HostMemory(name, total, max(available, 0), own.get("RssAnon", 0))


_Bound = tuple[str, int, int]  # name, total bytes, bytes left


def _group_limits(proc: Path) -> Iterator[_Bound]:
    """Limits of this process's memory control groups, from its own up to the mounted one."""
    for folder, is_v2 in group_folders(proc, "memory"):
        names = ("max", "current") if is_v2 else ("limit_in_bytes", "usage_in_bytes")
        limit, used = (_number(folder / f"memory.{name}") for name in names)
        if limit is not None and used is not None:
            stat = _words(folder / "memory.stat")
            prefix = "total_" if "total_active_file" in stat else ""  # v1: includes children
            cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield "the cgroup's memory limit", limit, limit - used + min(cached, used)


def _kilobytes(path: Path) -> dict[str, int]:
    """Bytes by name, from lines such as ``MemTotal:  24683656 kB``."""
    lines = (line.replace(":", " ").split() for line in lines_of(path))
    return {words[0]: int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _words(path: Path) -> dict[str, str]:
    pairs = (line.split() for line in lines_of(path))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _number(path: Path) -> int | None:
    """The number in a file; None where it holds none, such as ``max``."""
    text = "".join(lines_of(path)).strip()
    return int(text) if text.isdigit() else None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A block in which a GPU is the current device; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done all its work; does nothing for a CPU. The error of a GPU that has failed is
    only logged, so that it hides none before it: whatever uses the GPU next raises again.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        _log.warning("%s failed before its last work was done: %s", device, str(error).split("\n", 1)[0])


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype of ``fp16``, ``bf16`` or ``fp32``; torch's names and dtypes work too.

    Raises:
        ConfigError: the name is none of these.
    """
    name = str(name).removeprefix("torch.")
    dtype = DTYPES.get(_LONG_NAMES.get(name, name))
    if dtype is None:
        raise ConfigError("unknown dtype", seen=name, allowed="auto, fp16, bf16, fp32", field="dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """``fp16``, ``bf16`` or ``fp32``; torch's name for other dtypes."""
    return next((name for name, own in DTYPES.items() if own == dtype), str(dtype).removeprefix("torch."))


def cpu_name() -> str | None:
    """The CPU's model name, if the system has one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
