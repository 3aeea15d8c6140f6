"""OpenAI's published schema, as JSON Schema.

Reads single components of openai-openapi.yaml (87,000 lines), and its ``nullable``, which JSON Schema lacks.
    Published(path).check("CreateChatCompletionResponse", answer)
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jsonschema
import yaml

_REF = "#/components/schemas/"


class Published:
    """Components by name; each is read when it is needed."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        text = text[text.index("\n  schemas:\n") :]
        starts = [(m.start(), m[1]) for m in re.finditer(r"^    (\w+):$", text, re.M)]
        ends = [start for start, _ in starts[1:]] + [len(text)]
        self._texts = {name: text[a:b] for (a, name), b in zip(starts, ends, strict=True)}

    def check(self, name: str, value: object) -> None:
        """Raises:
        jsonschema.ValidationError: the value is no such component.
        """
        self._validator(name).validate(value)

    @functools.cache  # noqa: B019
    def _validator(self, name: str) -> jsonschema.Draft202012Validator:
        found: dict[str, Any] = {}
        self._collect(name, found)
        schema = {"$ref": _REF + name, "components": {"schemas": found}}
        return jsonschema.Draft202012Validator(schema)

    def _collect(self, name: str, found: dict[str, Any]) -> None:
        if name in found:
            return
        found[name], inner = self._read(name)
        for one in inner:
            self._collect(one, found)

    @functools.cache  # noqa: B019
    def _read(self, name: str) -> tuple[Any, list[str]]:
        """A component, and the names of those that it refers to."""
        part = re.split(r"^  \w+:$", self._texts[name], maxsplit=1, flags=re.M)[0]
        value = yaml.load(part, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # libyaml is much quicker
        return _with_null(value[name]), re.findall(rf"{_REF}(\w+)", part)


class Unpublished:
    """In place of the schema where it is not: the other checks of a test hold all the same."""

    def check(self, name: str, value: object) -> None:
        """Nothing is known of it."""


Schema = Published | Unpublished


def _with_null(value: Any) -> Any:
    """``nullable: true`` as a type of its own."""
    if isinstance(value, list):
        return [_with_null(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_null(one) for key, one in value.items()}
    if found.pop("nullable", False) is True:
        return {"anyOf": [found, {"type": "null"}]}
    return found
