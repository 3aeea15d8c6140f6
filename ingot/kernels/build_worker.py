"""The process that builds kernels for another one: it reads them from stdin and divides itself.

No process of it touches a GPU, and none outlives the one that asked.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import struct
import sys
from typing import Any

import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from ingot.control_groups import usable_processors

_INDEX = struct.Struct("H")
_PARENT_ENDS = 1  # PR_SET_PDEATHSIG


class _Target:
    """In the place of a GPU's driver: kernels may ask which GPU they are built for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target


def main(parent: int) -> None:
    """Build the pickled list of (source, target, options) on stdin; ``parent``: the process that asked."""
    end_with(parent)
    kernels = pickle.load(sys.stdin.buffer)
    reads, writes = os.pipe()
    os.write(writes, b"".join(map(_INDEX.pack, range(len(kernels)))))
    os.close(writes)
    own = os.getpid()
    children = []
    for _ in range(min(usable_processors(), len(kernels))):
        child = os.fork()
        if child == 0:
            end_with(own)
            try:
                build_some(kernels, reads)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def end_with(parent: int) -> None:
    """End this process when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PARENT_ENDS, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def build_some(kernels: list[Any], reads: int) -> None:
    """Build the kernels whose places a pipe holds, from which other processes read, too."""
    while place := os.read(reads, _INDEX.size):
        try:
            build(*kernels[_INDEX.unpack(place)[0]])
        except Exception:
            continue  # of whatever kind: who launches the kernel gets it


def build(source: Any, target: Any, options: Any) -> None:
    """Build a kernel and, where Triton compiles one for each signature, its launcher."""
    driver.set_active(_Target(target))
    kernel = triton.compile(source, target=target, options=options)
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(source, kernel.metadata)
