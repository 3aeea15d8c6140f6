"""Which objects of a schema are closed, and that closing makes no schema impossible."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from ingot.config.grammar_spec import Grammar
from ingot.text.grammar.closed_schemas import closed, closed_grammar

A, B = {"type": "string"}, {"type": "integer"}
CLOSED = {"additionalProperties": False}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def shut(**properties: Any) -> dict[str, Any]:
    return obj(**properties) | CLOSED


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (obj(a=A), shut(a=A)),
        (obj(a=obj(b=B)), shut(a=shut(b=B))),
        ({"type": "array", "items": obj(a=A)}, {"type": "array", "items": shut(a=A)}),
        ({"prefixItems": [obj(a=A), B]}, {"prefixItems": [shut(a=A), B]}),
        ({"anyOf": [obj(a=A), obj(b=B)]}, {"anyOf": [shut(a=A), shut(b=B)]}),
        ({"oneOf": [obj(a=A)]}, {"oneOf": [shut(a=A)]}),
        ({"allOf": [obj(a=A)]}, {"allOf": [shut(a=A)]}),
        (
            {"$ref": "#/$defs/X", "$defs": {"X": obj(a=A)}},
            {"$ref": "#/$defs/X", "$defs": {"X": shut(a=A)}},
        ),
        ({"additionalProperties": obj(a=A)}, {"additionalProperties": shut(a=A)}),
        (obj(properties=obj(a=A)), shut(properties=shut(a=A))),  # a property of this name
        ({"properties": {}}, {"properties": {}} | CLOSED),
    ],
)
def test_objects_are_closed_at_every_place(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before
    assert closed(expected) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "string"},
        {"enum": [{"properties": {"a": 1}}]},
        {"const": obj(a=A)},
        {"default": obj(a=A), "examples": [obj(a=A)]},
        obj(a=A) | {"additionalProperties": True},
        obj(a=A) | {"additionalProperties": B},
        obj(a=A) | {"patternProperties": {"^x": B}},
        {"not": obj(a=A)},
        {"if": obj(a=A), "then": obj(b=B)},
        {"allOf": [obj(a=A), obj(b=B)]},
        obj(a=A) | {"anyOf": [obj(b=B), {"required": ["a"]}]},
        {"allOf": [{"$ref": "#/$defs/X"}, obj(b=B)], "$defs": {"X": obj(a=A)}},
        obj(b=B) | {"$ref": "#/definitions/X", "definitions": {"X": obj(a=A)}},
        obj(b=B) | {"allOf": [{"anyOf": [{"$ref": "#/$defs/X"}]}], "$defs": {"X": obj(a=A)}},
    ],
)
def test_what_says_so_or_is_put_together_stays_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/X"}, obj(b=B)], "$defs": {"X": obj(a=A)}},
        obj(b=B) | {"$ref": "#/$defs/X", "$defs": {"X": {"allOf": [obj(a=A)]}}},
        obj(a=A) | {"oneOf": [obj(b=B), obj(c=A)]},
        {"anyOf": [{"allOf": [obj(a=A), obj(b=B)]}, obj(a=A)]},
    ],
)
def test_closing_makes_nothing_impossible(schema: dict[str, Any]) -> None:
    value = {"a": "x", "b": 1}
    valid = [jsonschema.Draft202012Validator(one).is_valid(value) for one in (schema, closed(schema))]
    assert valid == [True, True]


def test_a_part_that_is_a_single_choice_is_closed_elsewhere() -> None:
    """The same definition beside others, and alone: it stays open for the first's sake."""
    schema = obj(one={"$ref": "#/$defs/X"}, two=obj(b=B) | {"$ref": "#/$defs/X"}) | {"$defs": {"X": obj(a=A)}}
    found = closed(schema)
    assert found["$defs"]["X"] == obj(a=A)
    assert found["additionalProperties"] is False


def test_long_chains_of_references() -> None:
    names = {f"X{i}": {"allOf": [{"$ref": f"#/$defs/X{i + 1}"}, {}]} for i in range(3000)}
    schema = {"$defs": names | {"X3000": obj(a=A)}}
    assert closed(schema) == schema


def test_grammars_of_schemas_and_tools() -> None:
    assert closed_grammar(Grammar.json_schema(obj(a=A))) == Grammar.json_schema(shut(a=A))
    tools = [{"type": "function", "function": {"name": "f", "parameters": obj(a=A)}}]
    shut_tools = [{"type": "function", "function": {"name": "f", "parameters": shut(a=A)}}]
    for name, other in ((None, obj(b=B)), ("f", None)):
        found = closed_grammar(Grammar.tool_calls(tools, name=name, parallel=False, otherwise=other))
        end = None if other is None else shut(b=B)
        assert found == Grammar.tool_calls(shut_tools, name=name, parallel=False, otherwise=end)
    thinking = Grammar.json_schema(obj(a=A)).replace(thinking="must")
    assert closed_grammar(thinking).thinking == "must"
    for other in (Grammar.regex("a+"), Grammar.choice(["a"]), Grammar.json_object()):
        assert closed_grammar(other) == other
