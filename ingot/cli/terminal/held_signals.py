"""Ctrl-C and SIGTERM while a module with native code is imported: they arrive when the import has ended."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def hold_signals_during(name: str) -> None:
    """Hold signals while the main thread imports the module ``name`` for the first time.

    PyTorch's native code imports NumPy. It would drop the exception of a signal and go on without NumPy, or
    abort the process.
    """
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name))


class _Finder(MetaPathFinder):
    """Finds one module, once, and has its code run with signals held."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or threading.current_thread() is not threading.main_thread():
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _held(spec.loader.exec_module, fullname)  # type: ignore[method-assign, assignment]
        return spec


def _held(run: Callable[[ModuleType], None], name: str) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        with _hold(name):
            run(module)

    return exec_module


@contextlib.contextmanager
def _hold(name: str) -> Iterator[None]:
    """Signals that Python handles are sent again when the module ``name`` is imported."""
    arrived: list[int] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    handled = {each: handler for each, handler in before.items() if callable(handler)}
    for each in handled:
        signal.signal(each, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        for each, handler in handled.items():
            signal.signal(each, handler)
        if arrived:  # raised here, the exception would take the module out of sys.modules
            threading.Thread(target=_send_after_import, args=(name, arrived[0]), daemon=True).start()


def _send_after_import(name: str, number: int) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)  # waits for the main thread's import
    os.kill(os.getpid(), number)
