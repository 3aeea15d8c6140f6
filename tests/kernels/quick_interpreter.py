"""Triton's interpreter without the work that it repeats: the same operations, found once.

At every call of one kernel function by another, Triton 3.6 and 3.7 look through triton.language for what to
replace, although the launch has replaced it; they write the table of dtypes anew for every value; and they
work out of every integer sum and product whether it overflows, an answer that only their debug mode looks at.
Knows no kernel, and changes no number.

    quicken(monkeypatch)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, replace the language once a launch, find a dtype once, ask no overflow."""
    builder = interpreter.interpreter_builder
    asked = replace(builder.options, sanitize_overflow=builder.options.debug)
    monkeypatch.setattr(builder, "options", asked)
    monkeypatch.setattr(interpreter, "_patch_lang", _once_a_launch(interpreter._patch_lang))
    monkeypatch.setattr(interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype))


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``patch``, for the modules that a function sees, unless this launch has patched them."""
    patched: set[frozenset[str]] = set()

    class Launch:
        """What a launch takes back when it ends."""

        def __init__(self, scope: Any) -> None:
            self.scope = scope

        def restore(self) -> None:
            patched.clear()
            self.scope.restore()

    @cache
    def languages(fn: Any) -> frozenset[str]:
        return frozenset(seen.__name__ for seen in fn.__globals__.values() if seen is tl or seen is tl.core)

    def quick(fn: Any) -> Launch | None:
        seen = languages(fn)
        if seen in patched:
            return None  # a call within a launch, whose scope nobody takes
        patched.add(seen)
        return Launch(patch(fn))

    return quick


def _remembered(find: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """``find``, asked once for every element type."""
    known: dict[str, np.dtype[Any]] = {}

    def quick(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return quick
