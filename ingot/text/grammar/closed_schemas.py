"""JSON schemas whose objects have only the properties that they name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.config.grammar_spec import Grammar

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ONE = ("items", "additionalProperties", "contains", "propertyNames")
_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_JOINING = ("anyOf", "oneOf", "allOf", "$ref")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with ``additionalProperties: false`` where an object names its properties and does not say
    whether it has others.

    Combined objects stay open (several in ``allOf``, or ``anyOf`` or ``$ref`` next to properties): each part
    would refuse the others' properties. Conditions are left as they are.
    """
    joined: set[str] = set()  # what ``$ref`` names in combined objects, directly or through other references
    todo = [part for parts in _joined_parts(schema) for part in parts]
    while todo:
        part = todo.pop()
        if isinstance(part, str) and part not in joined:
            joined.add(part)
            target: Any = schema
            for name in part.removeprefix("#").strip("/").split("/"):
                target = target.get(name) if isinstance(target, Mapping) else None
            todo.append(target)
        elif isinstance(part, list):
            todo += part
        elif isinstance(part, Mapping):
            todo += [part.get(one) for one in _JOINING]
    return dict(_closed(schema, "#", joined))


def _closed(schema: Any, place: str, joined: set[str]) -> Any:
    """``place``: how ``$ref`` names the schema; ``joined``: places of parts of combined objects."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    joins = _joins(schema) or place in joined
    for key, value, name in inner_schemas(schema, joins=joins):
        inner = f"{place}/{key}" if name is None else f"{place}/{key}/{name}"
        part = _closed(value, inner, joined)
        if name is None:
            found[key] = part
        else:
            found[key] = found[key].copy()
            found[key][name] = part
    says = any(one in schema for one in _SAYS)
    if isinstance(schema.get("properties"), Mapping) and not (says or joins):
        found["additionalProperties"] = False
    return found


def inner_schemas(schema: Mapping[str, Any], *, joins: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """(key, schema, name or index) of the schemas in one; ``joins``: without the parts of a combined
    object.
    """
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from ((key, part, name) for name, part in value.items())
        elif key in _LISTS and isinstance(value, list):
            if not (joins and key in _JOINING):
                yield from ((key, part, index) for index, part in enumerate(value))
        elif key in _ONE:
            yield key, value, None


def _joins(schema: Mapping[str, Any]) -> bool:
    """Whether its object is combined from several parts."""
    every = schema.get("allOf")
    beside = "properties" in schema and any(one in schema for one in _JOINING)
    return beside or (isinstance(every, list) and len(every) > 1)


def _joined_parts(value: Any) -> Iterator[list[Any]]:
    """The parts of every combined object."""
    if isinstance(value, list):
        for one in value:
            yield from _joined_parts(one)
    elif isinstance(value, Mapping):
        if _joins(value):
            yield [value.get(one) for one in _JOINING]
        for one in value.values():
            yield from _joined_parts(one)


def closed_grammar(grammar: Grammar) -> Grammar:
    """The grammar with its schemas ``closed``, those of tools included."""
    if grammar.kind == "json_schema":
        return grammar.replace(text=json.dumps(closed(grammar.value()), ensure_ascii=False))
    if grammar.kind == "tool_calls":
        value: dict[str, Any] = grammar.value()
        value = {**value, "tools": {name: closed(schema) for name, schema in value["tools"].items()}}
        if "otherwise" in value:
            value["otherwise"] = closed(value["otherwise"])
        return grammar.replace(text=json.dumps(value, ensure_ascii=False))
    return grammar
