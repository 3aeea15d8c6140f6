"""The types of Triton's language, each worked out once: what its interpreter spends most of its time on.

For every value that a kernel makes, Triton 3.6 and 3.7 check and print the type of its block and wrap every
size of its shape; and for two operands of one type they look for the type of both. Knows no kernel, and
changes no number.

    quicken_types(monkeypatch)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic


def quicken_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a type once, and do not look for the type of equal ones."""
    monkeypatch.setattr(core, "_unwrap_if_constexpr", _plain_first(core._unwrap_if_constexpr))
    monkeypatch.setattr(core.block_type, "__init__", _made_once(core.block_type.__init__))
    monkeypatch.setattr(tl.tensor, "__init__", _tensor)
    check = TritonSemantic.binary_op_type_checking_impl
    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", _equal_first(check))
    broadcast = TritonSemantic.broadcast_impl_value
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", _same_shape_first(broadcast))


def _plain_first(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``unwrap``, for what may hold a constant of the compiler."""
    types = (tl.dtype, core.block_type, core.pointer_type, tl.tensor)
    plain = frozenset({int, str, bool, float, type(None), *types})
    return lambda value: value if type(value) in plain else unwrap(value)


def _made_once(make: Callable[..., None]) -> Callable[..., None]:
    """``block_type.__init__``, which checks a shape and prints a name for each element type and shape."""
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def quick(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is tl.constexpr else size for size in shape)
        key = type(element_ty), element_ty.name, sizes
        if key not in made:
            make(self, element_ty, shape)
            made[key] = dict(self.__dict__)
        self.__dict__.update(made[key], element_ty=element_ty)

    return quick


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """How many elements a block has, and its shape, as a tensor gives them."""
    number = 1
    for size in sizes:
        number *= size
    return tl.constexpr(number), tl.tuple([tl.constexpr(size) for size in sizes])


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """``tensor.__init__``; tensors of one shape share it."""
    sizes = type.__dict__.get("shape", ())
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(tuple(sizes))


def _equal_first(check: Callable[..., Any]) -> Callable[..., Any]:
    """``check``, unless both operands are numbers of one type, which need neither a cast nor a broadcast."""

    def quick(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        if type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and lhs.shape is rhs.shape:
            dividing = named.get("div_or_mod", len(flags) > 3 and flags[3])
            if not dividing and not lhs.dtype.is_ptr():
                return lhs, rhs
        return check(self, lhs, rhs, *flags, **named)

    return quick


def _same_shape_first(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """``broadcast``, unless both operands have one shape already."""

    def quick(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return quick
