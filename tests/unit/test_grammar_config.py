"""Grammars as plain data: serialization, and refusals before anything is compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ingot import Grammar, SamplingParams
from ingot.config.grammar_spec import MAX_CHARS, MAX_TOOLS
from ingot.errors import ConfigError, RequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema(SCHEMA),
        Grammar.json_schema(json.dumps(SCHEMA)),
        Grammar.json_object(),
        Grammar.regex(r"\d+"),
        Grammar.choice(["yes", "nö"]),
        Grammar.tool_calls([TOOL]),
        Grammar.regex("a").replace(thinking="may", before=" "),
    ],
)
def test_a_grammar_travels_as_json(grammar: Grammar) -> None:
    params = SamplingParams(grammar=grammar)
    again = SamplingParams.from_json(json.loads(json.dumps(params.to_json())))
    assert again == params
    assert again.grammar == grammar
    assert hash(again.grammar) == hash(grammar)


def test_tool_calls_hold_the_schemas_of_the_tools_that_may_be_called() -> None:
    plain = {"type": "function", "function": {"name": "stop"}}
    both = Grammar.tool_calls([TOOL, plain])
    assert both.schemas() == {"add": SCHEMA, "stop": {"type": "object"}}
    assert Grammar.tool_calls([TOOL, plain], name="stop").schemas() == {"stop": {"type": "object"}}


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Grammar("yaml", "a"), "unknown kind"),  # type: ignore[arg-type]
    (lambda: Grammar("regex", "a", "often"), "unknown thinking"),  # type: ignore[arg-type]
    (lambda: Grammar.regex(5), "must be a string"),  # type: ignore[arg-type]
    (lambda: Grammar.regex("a" * (MAX_CHARS + 1)), "too long"),
    (lambda: Grammar.regex("\ud800"), "UTF-16"),
    (lambda: Grammar.json_schema("{"), "not JSON"),
    (lambda: Grammar.json_schema("[]"), "must be an object"),
    (lambda: Grammar.json_schema(deep(200)), "levels deep"),
    (lambda: Grammar.json_schema({"minimum": float("nan")}), "JSON values"),
    (lambda: Grammar.json_schema({"a": object()}), "JSON values"),
    (lambda: Grammar.choice([]), "non-empty list"),
    (lambda: Grammar.choice([1]), "non-empty list"),  # type: ignore[list-item]
    (lambda: Grammar("tool_calls", "{}"), "tools and parallel"),
    (lambda: Grammar.tool_calls([]), "non-empty list"),
    (lambda: Grammar.tool_calls([{"type": "function"}]), r"tools\[0\]"),
    (lambda: Grammar.tool_calls([TOOL, {"function": {"name": "a b"}}]), "a b"),
    (lambda: Grammar.tool_calls([TOOL, TOOL]), "two tools"),
    (lambda: Grammar.tool_calls([{"function": {"name": ["f"]}}]), r"tools\[0\] has no name"),
    (lambda: Grammar.tool_calls([TOOL], name="sub"), "names no tool; seen: sub"),
    (lambda: Grammar.tool_calls([{"function": {"name": "f", "parameters": []}}]), "parameters of f"),
    (
        lambda: Grammar.tool_calls([{"function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)]),
        "too many",
    ),
    (lambda: SamplingParams(grammar="a+"), "must be a Grammar"),  # type: ignore[arg-type]
    (lambda: SamplingParams.from_json({"grammar": {"kind": "regex", "text": 5}}), "must be a string"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_invalid_grammars_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make()


def test_an_unknown_field_of_a_grammar_is_named() -> None:
    with pytest.raises(ConfigError, match="pattern"):
        SamplingParams.from_json({"grammar": {"kind": "regex", "pattern": "a"}})
