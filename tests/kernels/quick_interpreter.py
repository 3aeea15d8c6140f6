"""Triton's interpreter without the work that it repeats: the same operations, found once.

At every launch, and at every call of one kernel function by another, Triton 3.6 and 3.7 look through
triton.language for what to replace; they write the table of dtypes anew for every value; and they work out of
every integer sum and product whether it overflows, an answer that only their debug mode looks at. What they
repeat for the type of every value is in quick_types.py. Knows no kernel, and changes no number.

    with quick_interpreter():
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.quick_types import quicken_types


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Inside the block the language is replaced once, and nothing can be compiled."""
    scopes: list[Any] = []
    builder = interpreter.interpreter_builder
    asked = replace(builder.options, sanitize_overflow=builder.options.debug)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(builder, "options", asked)
        monkeypatch.setattr(interpreter, "_patch_lang", _once(interpreter._patch_lang, scopes))
        monkeypatch.setattr(interpreter, "_patch_attr", _called_at_once)
        monkeypatch.setattr(interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype))
        quicken_types(monkeypatch)
        yield
        for scope in reversed(scopes):
            scope.restore()


def _once(patch: Callable[[Any], Any], scopes: list[Any]) -> Callable[[Any], Any]:
    """``patch``, for modules that a function sees and none saw before; ``scopes`` get what takes it back."""

    class Launch:
        """What a launch takes back when it ends: nothing."""

        def restore(self) -> None:
            pass

    launch, patched = Launch(), set()

    @cache
    def languages(fn: Any) -> frozenset[str]:
        return frozenset(seen.__name__ for seen in fn.__globals__.values() if seen is tl or seen is tl.core)

    def quick(fn: Any) -> Launch:
        if languages(fn) not in patched:
            patched.add(languages(fn))
            scopes.append(patch(fn))
        return launch

    return quick


def _called_at_once(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replace a function of the language by itself with the interpreter's meaning, without a call between."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def quick(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*args, **named)

    scope.set_attr(obj, name, quick)


def _remembered(find: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """``find``, asked once for every element type."""
    known: dict[str, np.dtype[Any]] = {}

    def quick(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return quick
