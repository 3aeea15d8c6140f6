"""The types of Triton's language, each worked out once: what its interpreter spends most of its time on.

For every value that a kernel makes, Triton 3.6 and 3.7 check and print the type of its block and wrap every
size of its shape; and for two operands they look for the type of both and copy the smaller one into a block
as large as the other, which numpy does by itself. Knows no kernel, and changes no number.

    quicken_types(monkeypatch)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle

_Constant = tuple[Any, Any, Any]  # an array that nothing writes to, its element type, the type of its block


def quicken_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a type once, and do not look for the type of equal ones."""
    monkeypatch.setattr(core, "_unwrap_if_constexpr", _plain_first(core._unwrap_if_constexpr))
    monkeypatch.setattr(core.block_type, "__init__", _made_once(core.block_type.__init__))
    monkeypatch.setattr(core.block_type, "to_ir", lambda self, builder: self)  # as the interpreter's builder
    monkeypatch.setattr(tl.tensor, "__init__", _tensor)
    monkeypatch.setattr(TensorHandle, "__post_init__", _checked_once(TensorHandle.__post_init__))
    monkeypatch.setattr(TritonSemantic, "scalar_constant", _constants(TritonSemantic.scalar_constant))
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
            made[key] = dict(self.__dict__, of_tensors=_shape(sizes))
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
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.__dict__.get("of_tensors") or _shape(())


def _checked_once(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """``TensorHandle.__post_init__``, which holds the size of an array's elements against its type's."""
    right = set()

    def quick(self: Any) -> None:
        key = self.data.itemsize, self.dtype.name
        if key not in right:
            check(self)
            right.add(key)

    return quick


def _constants(make: Callable[..., Any]) -> Callable[..., Any]:
    """``scalar_constant``, whose arrays are made once."""
    known: dict[tuple[Any, ...], _Constant] = {}

    def quick(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), value, dtype.name
        if key not in known:
            known[key] = _constant(make(self, value, dtype))
        return _of_constant(known[key])

    return quick


def _constant(value: Any) -> _Constant:
    value.handle.data.setflags(write=False)
    return value.handle.data, value.handle.dtype, value.type


def _of_constant(known: _Constant) -> Any:
    """A tensor of its own, whose handle an operation may change."""
    data, dtype, type = known
    return tl.tensor(TensorHandle(data, dtype), type)


def _equal_first(check: Callable[..., Any]) -> Callable[..., Any]:
    """``check``, unless both operands are of one element type, which need no cast, or one is a number that
    has been seen beside such a block: its block is made once.
    """
    known: dict[tuple[Any, ...], _Constant] = {}

    def quick(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        if type(lhs) is not tl.tensor:
            return check(self, lhs, rhs, *flags, **named)
        if type(rhs) is tl.tensor:
            dividing = named.get("div_or_mod", len(flags) > 3 and flags[3])
            if lhs.dtype is rhs.dtype and not dividing and not lhs.dtype.is_ptr():
                return _stretched(lhs, rhs)
            return check(self, lhs, rhs, *flags, **named)
        key = lhs.type.name, type(rhs), rhs, flags, *named.items()
        if key not in known:
            found, block = check(self, lhs, rhs, *flags, **named)
            if found is not lhs:
                return found, block
            known[key] = _constant(block)
        return lhs, _of_constant(known[key])

    return quick


def _stretched(lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Both as blocks of one shape; numpy repeats the elements of the smaller one where they are needed."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    sizes = _joint(lhs.type.__dict__.get("shape", ()), rhs.type.__dict__.get("shape", ()))
    both = core.block_type(lhs.dtype, list(sizes))
    return tuple(tl.tensor(TensorHandle(x.handle.data, x.handle.dtype), both) for x in (lhs, rhs))  # type: ignore[return-value]


@cache
def _joint(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of two blocks together, of which the shorter begins with sizes of 1."""
    return tuple(np.broadcast_shapes(left, right))


def _same_shape_first(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """``broadcast``, unless both operands have one shape already."""

    def quick(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return quick
