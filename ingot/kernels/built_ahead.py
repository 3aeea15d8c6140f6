"""Kernels built before they run, side by side in processes; Triton keeps them for the next start.

with built_ahead():
    forward(batch)  # launches no kernel; at the end those that no start has built yet are built
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from ingot.control_groups import usable_processors
from ingot.kernels.kept_kernels import find_kernel_folder
from ingot.kernels.triton_hooks import active_mode, hooks_missing

_log = logging.getLogger(__name__)
_FEW = 2  # kernels for which no process is worth its start
_ONE_BLOCK = threading.Lock()
_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ingot.kernels.build_worker import main; main(int(sys.argv[2]))"
)
_ROOT = str(Path(__file__).parents[2])


@contextmanager
def without_launches() -> Iterator[None]:
    """Run none of the kernels that this thread launches on a GPU in the block; they are noted for the next
    ``built_ahead``. What they would have written is undefined, but integers, which may be indices, are zeros.
    With a Triton that has no hook for this, launches run, and each builds its kernel: slower, once.

    Raises:
        DeviceError: no folder can hold built kernels.
    """
    find_kernel_folder()
    if not can_note_launches():
        yield
        return
    with _ONE_BLOCK, _NOTED.instead_of_launches(), _ZeroIntegers():
        yield


@contextmanager
def built_ahead() -> Iterator[None]:
    """``without_launches``, and build the kernels that were noted since the last time. One that cannot be
    built is built where it is launched after the block, and raises there.
    """
    with without_launches():
        yield
    missing = _NOTED.take_missing()
    if len(missing) > _FEW and usable_processors() > 1:
        build_side_by_side(missing)


def noted_folders() -> frozenset[str]:
    """Names, within Triton's folder, of those of the kernels that this process has noted so far."""
    return frozenset(_NOTED.folders)


@functools.cache
def can_note_launches() -> bool:
    """Whether this Triton has the hooks; where it has not, the first call says so."""
    missing = hooks_missing()
    if missing is None:
        return True
    _log.warning("Triton %s has no %s: kernels are built one after the other", triton.__version__, missing)
    return False


def build_side_by_side(kernels: list[Any]) -> None:
    """Build kernels in a process that divides itself, which ends with this one."""
    _log.warning("building %d kernels on %d cores; later starts find them", len(kernels), usable_processors())
    path = json.dumps([os.path.abspath(entry) for entry in sys.path] + [_ROOT])
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, path, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a kernel that cannot be built reports it where it is launched
    )
    try:
        process.communicate(_pickled(kernels))
    finally:
        process.kill()
        process.wait()


class _Kernel:
    """Stands in for a kernel that a launch builds, or finds built."""

    def __init__(self, build: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        self._build, self._keep = build, keep
        self._kernel: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._kernel is None:
            self._kernel = self._build()
            self._keep(self._kernel)
        return getattr(self._kernel, name)


class _Noted:
    """Kernels that were launched and did not run.

    Attributes:
        folders: names of their folders, within Triton's.
    """

    def __init__(self) -> None:
        self._missing: list[Any] = []
        self.folders: set[str] = set()
        self._launched: JITFunction[Any] | None = None

    def take_missing(self) -> list[Any]:
        """Source, target and options of each that was not in the folder, once."""
        missing, self._missing = self._missing, []
        return missing

    def submit(
        self, key: str, build: Callable[[], Any], keep: Callable[[Any], None], *unused: object
    ) -> _Kernel:
        """What Triton calls to have a kernel built that is not in this process's memory."""
        kernel = _Kernel(build, keep)
        source, target, options = self._arguments(build)
        found = get_cache_manager(sha256(key.encode()).hexdigest())
        if (folder := getattr(found, "cache_dir", None)) is not None:
            self.folders.add(Path(folder).name)
        if found.get_group(f"{source.name[:150]}.json") is None:
            self._missing.append((source, target, options))
        keep(kernel)  # else Triton would prepare every launch anew
        return kernel

    def _arguments(self, build: Callable[[], Any]) -> tuple[Any, Any, Any]:
        """What ``build`` would give to the compiler."""
        given: list[tuple[Any, Any, Any]] = []

        def compiler(source: Any, *, target: Any, options: Any, **unused: Any) -> None:
            given.append((source, target, options))

        assert self._launched is not None
        usual, self._launched.compile = self._launched.compile, compiler
        try:
            build()
        finally:
            self._launched.compile = usual
        return given[0]

    @contextmanager
    def instead_of_launches(self) -> Iterator[None]:
        """Launches of this thread only ask for their kernel; those of others run."""
        usual = JITFunction.run

        def run(kernel: JITFunction[Any], *args: Any, warmup: bool, **values: Any) -> Any:
            if active_mode.get() is not self:
                return usual(kernel, *args, warmup=warmup, **values)
            self._launched = kernel
            return usual(kernel, *args, warmup=True, **values)

        token = active_mode.set(self)
        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = usual
            active_mode.reset(token)


_NOTED = _Noted()


class _ZeroIntegers(TorchFunctionMode):
    """New integer tensors are zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY and not made.is_floating_point() else made


class _Pickler(pickle.Pickler):
    """Names functions of kernels instead of copying them."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, JITFunction):
            return NotImplemented
        return function_named, (value.module, value.__name__, value.cache_key)


def function_named(module: str, name: str, cache_key: str) -> Any:
    """The function, with its key of the process that launches it: keys depend on which one is asked first."""
    function = getattr(importlib.import_module(module), name)
    function.hash = cache_key
    return function


def _pickled(value: Any) -> bytes:
    data = io.BytesIO()
    _Pickler(data).dump(value)
    return data.getvalue()
