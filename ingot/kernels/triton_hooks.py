"""Parts of Triton that are not public, and how to find out that they are gone; known: 3.6 and 3.7."""

from __future__ import annotations

import importlib
import inspect
import threading
from contextvars import ContextVar
from typing import Any

from triton.runtime import cache
from triton.runtime.jit import JITFunction

_MODULE = "triton.runtime._async_compile"
_TAKEN = 4  # parameters of ``submit``: itself, a key, what compiles, what keeps the result


def _found_mode() -> Any:
    try:
        return importlib.import_module(_MODULE)
    except ImportError:
        return None


_mode = _found_mode()
active_mode: ContextVar[Any] = getattr(_mode, "active_mode", None) or ContextVar("none", default=None)


def hash_compiler() -> None:
    """Begin, in a thread, what a process's first kernel waits for: Triton names built kernels by a hash of
    its compiler, 460 MB. A Triton that keeps no such hash begins nothing.
    """
    if hasattr(cache, "triton_key"):
        threading.Thread(target=cache.triton_key, name="compiler's hash", daemon=True).start()


def hooks_missing() -> str | None:
    """The first part that this Triton has not, or has in another form; None: it has all of them."""
    if not isinstance(getattr(_mode, "active_mode", None), ContextVar):
        return f"{_MODULE}.active_mode"
    submit = getattr(getattr(_mode, "AsyncCompileMode", None), "submit", None)
    if submit is None or len(inspect.signature(submit).parameters) < _TAKEN:
        return f"{_MODULE}.AsyncCompileMode.submit"
    return None if "warmup" in inspect.signature(JITFunction.run).parameters else "JITFunction.run(warmup)"
