"""Frozen dataclasses that convert to JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, Self

from ingot.errors import ConfigError


class JsonConfig:
    """Mixin for frozen dataclasses: ``to_json`` and ``from_json``, nested configs and tuples included."""

    def to_json(self) -> dict[str, Any]:
        """Every field whose metadata do not say ``json`` False, as JSON types."""
        return {f.name: _plain(getattr(self, f.name)) for f in _fields(type(self)).values()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuild from ``to_json`` output. Raises ``ConfigError`` if ``data`` is not an object, a key is
        unknown, or a field without default is missing.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"{cls.__name__} must be a JSON object", seen=data)
        fields = _fields(cls)
        unknown = sorted(str(key) for key in data if key not in fields)
        if unknown:
            raise ConfigError(f"{cls.__name__} has no such field", seen=unknown, allowed=sorted(fields))
        none = dataclasses.MISSING
        needed = [name for name, f in fields.items() if f.default is none and f.default_factory is none]
        missing = [name for name in needed if name not in data]
        if missing:
            raise ConfigError(f"{cls.__name__} lacks fields", seen=sorted(data), fix=f"add {missing}")
        hints = _hints(cls)
        return cls(**{name: _typed(hints[name], value) for name, value in data.items()})

    def odd_fields(self) -> list[str]:
        """Fields whose values are not of the declared types, nested ones as ``model.rope.theta``."""
        hints = _hints(type(self))
        found: list[str] = []
        for name in _fields(type(self)):
            value = getattr(self, name)
            if not _fits(hints[name], value):
                found.append(name)
            elif isinstance(value, JsonConfig):
                found += [f"{name}.{inner}" for inner in value.odd_fields()]
        return found

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; checked like a new one."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def _json_fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls) if f.metadata.get("json", True)}


_fields: Callable[[type], dict[str, dataclasses.Field[Any]]] = functools.cache(_json_fields)


def _plain(value: Any) -> Any:
    if isinstance(value, JsonConfig):
        return value.to_json()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is of a declared type; the fields of a nested config are not checked."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(part, value) for part in parts)
    if origin is typing.Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(parts[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(parts[1], item) for item in value.values())
    if hint in (int, float):
        return not isinstance(value, bool) and isinstance(value, (int, hint))
    return isinstance(value, hint)


@functools.cache
def _stays(hint: Any) -> bool:
    """Whether values of a type are in Python what they are in JSON."""
    nested = isinstance(hint, type) and issubclass(hint, JsonConfig)
    return not nested and typing.get_origin(hint) is not tuple and all(map(_stays, typing.get_args(hint)))


def _typed(hint: Any, value: Any) -> Any:
    """A value from JSON as the type that the field declares. One of another shape stays as it is:
    ``__post_init__`` refuses it.
    """
    if _stays(hint) and not isinstance(value, dict):
        return value
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return _typed(inner[0], value) if len(inner) == 1 else value
    if origin is tuple and isinstance(value, (list, tuple)):
        item = typing.get_args(hint)[0]
        return tuple(_typed(item, v) for v in value)
    if origin is dict and isinstance(value, dict):
        item = typing.get_args(hint)[1]
        return {k: _typed(item, v) for k, v in value.items()}
    nested = isinstance(hint, type) and issubclass(hint, JsonConfig)
    if nested and value is not None and not isinstance(value, hint):
        return hint.from_json(value)
    return value
