"""Kernels for a CPU: text of LLVM's language, compiled in this process by llvmlite (``ingot[cpu]``).

A kernel is ``void kernel(args, thread, threads)``. It runs on PyTorch's own OpenMP threads, so that no second
pool of threads waits beside them.

    launch = compiled(text)                     # where there is a host_cpu()
    launch([x.data_ptr(), rows], 2)             # arguments: integers and addresses, as int64; threads
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

OLDEST = (0, 46)  # llvmlite's release whose LLVM has pointers of one type
_LOCK = threading.Lock()
# A fork waits for the thread that holds the lock, and finds what it guards complete.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_LAUNCH = """
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
define internal void @each_thread(ptr %args) {
  %thread = call i32 @omp_get_thread_num()
  %threads = call i32 @omp_get_num_threads()
  %t = zext i32 %thread to i64
  %n = zext i32 %threads to i64
  call void @ENTRY(ptr %args, i64 %t, i64 %n)
  ret void
}
define void @launch(ptr %args, i32 %threads) {
  call void @GOMP_parallel(ptr @each_thread, ptr %args, i32 %threads, i32 0)
  ret void
}
"""


@dataclass(frozen=True)
class HostCpu:
    """What this processor has. ``avx512``: 16 floats per register; ``vnni``: products of four pairs of int8,
    with AVX-512; ``fma``: fused multiply-add of floats.
    """

    fma: bool
    avx512: bool
    vnni: bool


@cache
def host_cpu() -> HostCpu | None:
    """This processor; None where kernels cannot be compiled or share PyTorch's threads."""
    binding = _binding()
    if binding is None or not _openmp():
        return None
    has = binding.get_host_cpu_features()
    arm = binding.get_process_triple().startswith(("aarch64", "arm64"))
    avx512 = all(has.get(name, False) for name in ("avx512f", "avx512bw", "avx512vl"))
    return HostCpu(arm or has.get("fma", False), avx512, avx512 and has.get("avx512vnni", False))


Launch = Callable[[Sequence[int] | int, int], None]


def compiled(text: str, entry: str = "kernel") -> Launch:
    """A launcher of a module's function ``entry``, optimized for this processor; only where there is a
    ``host_cpu``. It takes the arguments or their address, and the number of threads.
    """
    binding = _binding()
    assert binding is not None
    with _LOCK:
        module = binding.parse_assembly(text + _LAUNCH.replace("ENTRY", entry))
        module.verify()
        target = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(),
            features=binding.get_host_cpu_features().flatten(),
            opt=3,
            jit=True,
        )
        passes = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=1))
        passes.getModulePassManager().run(module, passes)
        engine = binding.create_mcjit_compiler(module, target)
        engine.finalize_object()
        address = engine.get_function_address("launch")
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)

    def launch(arguments: Sequence[int] | int, threads: int) -> None:
        run(arguments if isinstance(arguments, int) else _words(arguments), threads)

    launch.engine = engine  # type: ignore[attr-defined]  # it owns the code
    return launch


def _words(arguments: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(arguments))(*arguments)


@cache
def _binding() -> Any:
    """llvmlite, or None where it is missing or too old to read our text."""
    try:
        release = importlib.import_module("llvmlite").__version__
        binding = importlib.import_module("llvmlite.binding")
    except ImportError:
        return None
    if tuple(int(part) for part in release.split(".")[:2]) < OLDEST:
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    return binding


@cache
def _openmp() -> bool:
    """Whether kernels can run on the threads of the OpenMP that PyTorch has loaded, GNU's."""
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    place = Path(torch.__file__).parent
    for path in (*place.glob("lib/libgomp*.so*"), *place.parent.glob("torch.libs/libgomp*.so*")):
        library = ctypes.CDLL(str(path))
        if all(hasattr(library, name) for name in names):
            for name in names:
                _binding().add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
            return True
    return False
