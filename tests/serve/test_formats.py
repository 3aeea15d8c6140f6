"""Answers in a requested form, and forms that are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.serve.client import Server
from tests.serve.conftest import chat, completion

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
STRICT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
PERSON = "schema"
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"response_format": JSON_SCHEMA}, PERSON),
    "strict schema": ({"response_format": STRICT}, PERSON),
    "guided schema": ({"guided_json": SCHEMA}, PERSON),
    "guided schema as text": ({"guided_json": json.dumps(SCHEMA)}, PERSON),
    "guided regex": ({"guided_regex": "a{3}|b{4}"}, "aaa|bbbb"),
    "guided choice": ({"guided_choice": ["yes", "no (a+b)"]}, r"yes|no \(a\+b\)"),
    "structured schema": ({"structured_outputs": {"json": SCHEMA, "regex": None}}, PERSON),
    "structured regex": ({"structured_outputs": {"regex": "[xy]{5}"}}, "[xy]{5}"),
    "structured choice": ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
}


def wide(fields: int) -> dict[str, Any]:
    """An object of optional fields."""
    properties = {f"field_{i}": {"type": ["integer", "null"]} for i in range(fields)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


# Values → the field that the error names.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}, "response_format"),
    ({"guided_json": {"not": {}}}, "guided_json"),
    ({"guided_json": {"$ref": "https://example.com/a.json"}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": {"enum": ["a" * 65_536]}}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_regex": "a" * 65_537}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice[0]"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar"),
    ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_regex": "a+", "ignore_eos": True}, "ignore_eos"),
    ({"guided_json": wide(2100)}, "guided_json"),
]


def check(text: str, expected: str) -> None:
    if expected is PERSON:
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(expected, text), text


@pytest.mark.stays("schema", "guided regex", "structured choice")
@pytest.mark.parametrize("name", FORMS)
def test_forms(server: Server, name: str) -> None:
    """Whole and streamed, of chats and of completions."""
    values, expected = FORMS[name]
    values = {**values, "max_tokens": 60}
    (choice,) = server.post(CHAT, chat("Name a person.", **values)).json["choices"]
    assert choice["finish_reason"] == "stop"
    check(choice["message"]["content"], expected)
    events = server.events(CHAT, chat("Name a person.", **values))
    streamed = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert streamed == choice["message"]["content"]
    reply = server.post(COMPLETIONS, completion(["It is", "He is"], n=2, temperature=1.0, seed=3, **values))
    assert [choice["finish_reason"] for choice in reply.json["choices"]] == ["stop"] * 4
    for choice in reply.json["choices"]:
        check(choice["text"], expected)


def test_any_object(server: Server) -> None:
    form = {"type": "json_object"}
    message = server.post(CHAT, chat("Hi", response_format=form, max_tokens=40)).json["choices"][0]["message"]
    assert message["content"].startswith("{")


@pytest.mark.parametrize(("values", "field"), BAD, ids=lambda value: str(value)[:50])
def test_an_unsupported_form_is_a_400(server: Server, values: dict[str, Any], field: str) -> None:
    """The engine never gets the request."""
    tokens = server.metric("ingot_prompt_tokens_total")
    for path, body in ((CHAT, chat(stream=True)), (COMPLETIONS, completion())):
        reply = server.post(path, body | values)
        assert reply.status == 400, reply.data
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["param"] == field
    assert server.metric("ingot_prompt_tokens_total") == tokens


def test_a_refusal_names_the_part(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = server.post(CHAT, chat(response_format=form)).error
    assert error["param"] == "response_format"
    assert "properties.a.items" in error["message"]


def test_a_schema_of_64_kib_is_taken(server: Server) -> None:
    parts = {f"part_{i}": wide(50) for i in range(30)}
    schema: dict[str, Any] = {"type": "object", "properties": parts, "description": ""}
    room = (64 << 10) - len(json.dumps(schema, separators=(",", ":")))
    assert 0 < room < 8000
    schema["description"] = "x" * room
    assert server.post(CHAT, chat(guided_json=schema, max_tokens=5)).status == 200
    schema["description"] += "x"
    reply = server.post(CHAT, chat(guided_json=schema, max_tokens=5))
    assert (reply.status, reply.error["param"]) == (400, "guided_json")
