"""A CPU's kernels compiled once for all processes and runs of the tests: their code is kept in a folder.

A kernel is found by its text, this processor, llvmlite's release and what calls llvmlite, so that a change
of any compiles it anew. Processes that are not forked (tests/forked.py) compile as users' do.

    compile_once(folder)                        # before any kernel
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

from ingot.kernels.cpu import llvm_module


def compile_once(folder: Path) -> None:
    """Does nothing without llvmlite or where ``folder`` cannot be written."""
    try:
        binding = importlib.import_module("llvmlite.binding")
        folder.mkdir(parents=True, exist_ok=True)
    except (ImportError, OSError):
        return
    if os.access(folder, os.W_OK):
        _keep(binding, folder)


def _keep(binding: Any, folder: Path) -> None:
    parse, create = binding.parse_assembly, binding.create_mcjit_compiler
    passes = binding.newpassmanagers.ModulePassManager
    run = passes.run
    compiler = f"{importlib.import_module('llvmlite').__version__} {inspect.getsource(llvm_module)}"
    known: dict[int, tuple[Path, bytes | None]] = {}  # by the module: its code and where that is kept

    def parsed(text: str) -> Any:
        module = parse(text)
        words = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()} {compiler} {text}"
        place = folder / f"{hashlib.sha256(words.encode()).hexdigest()}.o"
        known[_address(module)] = place, place.read_bytes() if place.exists() else None
        return module

    def optimized(self: Any, module: Any, builder: Any) -> None:
        if known[_address(module)][1] is None:
            run(self, module, builder)

    def compiler_of(module: Any, target: Any) -> Any:
        place, code = known.pop(_address(module))
        engine = create(module, target)
        engine.set_object_cache(lambda _, new: _write(place, new), lambda _: code)
        return engine

    binding.parse_assembly, binding.create_mcjit_compiler = parsed, compiler_of
    passes.run = optimized


def _address(module: Any) -> int:
    """Of LLVM's module, also where llvmlite has another object of it."""
    return int(ctypes.cast(module._ptr, ctypes.c_void_p).value or 0)


def _write(place: Path, code: bytes) -> None:
    """All at once: another worker may write the same."""
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(code)
    os.replace(file.name, place)
