"""``ingot serve --config FILE.yaml``: flags in a file, and engines with values of their own."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ingot.config.files.yaml_text import YamlError, load_yaml
from ingot.errors import ConfigError

Flags = TypeVar("Flags")
_ENGINES, _PATH = "engines", "path"


@dataclass(frozen=True)
class ServeFile:
    """The file's values by field, and its engines: paths, each with the values of that engine alone."""

    values: dict[str, Any] = field(default_factory=dict)
    engines: Sequence[tuple[str, dict[str, Any]]] = ()


def read_serve_file(path: Path, types: Mapping[str, Any], each: Mapping[str, Any]) -> ServeFile:
    """The values in a file.

    Args:
        types: of the flags, as ``flag_types`` gives them.
        each: of the flags that an engine may have of its own.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    try:
        found = load_yaml(path)
    except OSError as error:
        raise _refused("the file cannot be read", f"{path}: {error.strerror}") from None
    except YamlError as error:
        raise _refused("the file is not YAML", f"{path}: {error}") from None
    values = _mapping(found, f"{path}")
    given = values.pop(_ENGINES, None)
    engines = given if isinstance(given, list) else [] if given is None else [given]
    return ServeFile(
        _values(values, types, f"{path}", _ENGINES),
        [_engine(one, each, f"{path}: {_ENGINES}[{place}]") for place, one in enumerate(engines)],
    )


def flag_types(*kinds: type) -> dict[str, Any]:
    """Field → annotated type, of dataclasses whose fields are flags."""
    return {
        name: hint
        for kind in kinds
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
    }


def behind(flags: Flags, values: Mapping[str, Any]) -> Flags:
    """The flags, with ``values`` for those that the command line does not give."""
    own = {one.name: getattr(flags, one.name) for one in fields(flags)}  # type: ignore[arg-type]
    free = [name for name, value in own.items() if value is None or value is False or value == []]
    return replace(flags, **{name: values[name] for name in free if name in values})  # type: ignore[type-var]


def _engine(given: Any, types: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    if isinstance(given, str):
        return given, {}
    values = _mapping(given, where)
    path = values.pop(_PATH, None)
    if not isinstance(path, str):
        raise _refused("an engine needs a path: a folder or a Hugging Face id", f"{where}: {path!r:.80}")
    return path, _values(values, types, where, _PATH)


def _mapping(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise _refused("flags and their values are expected", where, "max-queue: 64")
    return dict(found)


def _values(given: Mapping[str, Any], types: Mapping[str, Any], where: str, also: str) -> dict[str, Any]:
    """Values by field; a key without a value is ignored. ``also``: a known key that is not a flag."""
    keys = {name.replace("_", "-"): name for name in types}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = keys.get(key.replace("_", "-"))
        if name is None:
            near = difflib.get_close_matches(key, [also, *keys], n=1)
            fix = f"did you mean {near[0]}?" if near else None
            raise _refused("unknown key", f"{where}: {key:.80}", None if near else [also, *keys], fix)
        if value is not None:
            values[name] = _value(value, types[name], f"{where}: {key}")
    return values


def _value(value: Any, hint: Any, where: str) -> Any:
    """A value checked for a flag's type and range; a flag that may be repeated takes one or a list."""
    types = [one for one in typing.get_args(typing.get_args(hint)[0]) or [bool] if one is not type(None)]
    options = hint.__metadata__[0]
    kind, is_list = types[0], typing.get_origin(types[0]) is list
    kind = typing.get_args(kind)[0] if is_list else kind
    parts = value if is_list and isinstance(value, list) else [value]
    for part in parts:
        fits = type(part) is kind or (kind is float and type(part) is int)
        if not fits:
            raise _refused("the value has the wrong type", f"{where}: {part!r:.80}", _WORDS[kind])
        low, high = options.min, options.max
        if (low is not None and not part >= low) or (high is not None and not part <= high):
            allowed = f">= {low}" if high is None else f"{low} to {high}"
            raise _refused("the value is out of range", f"{where}: {part}", allowed)
    return parts if is_list else value


_WORDS = {int: "an integer", float: "a number", str: "a text; put it in quotes", bool: "true or false"}


def _refused(what: str, seen: str, allowed: Any = None, fix: str | None = None) -> ConfigError:
    fix = "--config" if fix is None else f"--config: {fix}"
    return ConfigError(f"--config: {what}", seen=seen, allowed=allowed, field="config", fix=fix)
