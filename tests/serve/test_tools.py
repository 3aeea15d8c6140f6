"""Tools and thoughts over HTTP: calls as messages and as deltas, the model's prompt, refusals.

The model has never seen a tool. Where it must call one, its grammar makes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ingot import LLM, Chat, Grammar
from ingot.serve.api.answer_parts import AnswerParts, ArgumentsDelta, CallStart, ContentDelta, ReasoningDelta
from ingot.serve.api.tool_fields import read_tools
from ingot.serve.api_errors import ApiError
from ingot.serve.response_formats import MAX_SCHEMA_BYTES, AnswerFormat
from tests.serve.client import JSON, Server
from tests.serve.conftest import NAME, TOOLS, chat
from tests.serve.published import Schema

CHAT = "/v1/chat/completions"
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters |= {"additionalProperties": False, "x-guidance": {"whitespace_pattern": ""}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD, SAY = tool("add", a=NUMBER, b=NUMBER), tool("say", word={"enum": ["yes", "no"]})
BOTH = [ADD, SAY]
NAMED = {"type": "function", "function": {"name": "say"}}
CALLS: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": NAMED},
    "n": {"tool_choice": "required", "n": 2, "temperature": 1.0, "seed": 5, "parallel_tool_calls": False},
    "logprobs": {"tool_choice": NAMED, "logprobs": True, "top_logprobs": 2},
    "cut": {"tool_choice": NAMED, "max_tokens": 30},
}


def body(text: str = "Add 1 and 2.", **values: Any) -> dict[str, Any]:
    return {**chat(text), "model": TOOLS, "tools": BOTH, "max_tokens": 150, **values}


def check_calls(message: dict[str, Any]) -> None:
    """Each call is of a tool, with arguments by its schema."""
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in BOTH}
    assert message["content"] is None
    assert message["tool_calls"]
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])


@pytest.mark.stays("required", "cut")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_must_be(tool_server: Server, published: Schema, name: str) -> None:
    """Its stream says the same: index, id, type and name first, then arguments in pieces, then the reason."""
    values = CALLS[name]
    reply = tool_server.post(CHAT, body(**values))
    assert reply.status == 200, reply.data
    published.check("CreateChatCompletionResponse", reply.json)
    events = tool_server.events(CHAT, body(**values))
    for event in events:
        published.check("CreateChatCompletionStreamResponse", event)
    for choice in reply.json["choices"]:
        if name == "cut":
            assert choice["finish_reason"] == "length"
        else:
            assert choice["finish_reason"] == "tool_calls"
            check_calls(choice["message"])
        mine = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        check_stream(mine, choice)


def check_stream(mine: list[dict[str, Any]], choice: dict[str, Any]) -> None:
    assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
    assert mine[0]["delta"]["role"] == "assistant"
    assert all("role" not in one["delta"] for one in mine[1:])
    calls: list[dict[str, Any]] = []
    for one in mine:
        for part in one["delta"].get("tool_calls", []):
            if part["index"] == len(calls):
                assert set(part) == {"index", "id", "type", "function"}
                calls.append({**part, "function": {**part["function"]}})
            else:
                assert set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    reported = [{k: v for k, v in call.items() if k not in ("index", "id")} for call in calls]
    expected = [
        {k: v for k, v in one.items() if k != "id"} for one in choice["message"].get("tool_calls", [])
    ]
    assert reported == expected
    assert "".join(one["delta"].get("content") or "" for one in mine) == ""
    if choice["logprobs"]:
        assert [e for one in mine for e in one["logprobs"]["content"]] == choice["logprobs"]["content"]
    else:
        assert len(mine) < 40  # what is held back makes no chunk


def test_a_named_tool_is_the_one_that_is_called(tool_server: Server) -> None:
    for named in (ADD, SAY):
        name = named["function"]["name"]
        choice = {"type": "function", "function": {"name": name}}
        message = tool_server.post(CHAT, body(tool_choice=choice)).json["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == [name]


def test_the_prompt_describes_tools_and_answers_equal_the_librarys(
    tool_server: Server, tool_engine: Path
) -> None:
    llm = LLM(tool_engine, "cpu")
    messages = body()["messages"]
    for values, tools in (({}, BOTH), ({"tool_choice": "none"}, []), ({"tools": []}, [])):
        found = tool_server.post(CHAT, body(**values)).json
        expected = llm.generate(Chat(messages, tools), max_new_tokens=150)[0]
        assert found["choices"][0]["message"]["content"] == expected.text
        assert found["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
        assert found["choices"][0]["finish_reason"] == "stop"
    grammar = Grammar.tool_calls(BOTH)
    expected = llm.generate(Chat(messages, BOTH), max_new_tokens=150, grammar=grammar)[0]
    found = tool_server.post(CHAT, body(tool_choice="required")).json
    assert found["usage"]["completion_tokens"] == len(expected.token_ids)


def test_calls_and_their_results_are_part_of_a_conversation(tool_server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    history = [
        *body()["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
    ]
    reply = tool_server.post(CHAT, body(messages=history, max_tokens=50))
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    ids = tool_server.post("/tokenize", {"messages": history}).json["tokens"]
    text = tool_server.post("/detokenize", {"tokens": ids}).json["prompt"]
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in text
    assert "<|im_start|>tool\n3<|im_end|>" in text


def test_a_call_or_json(tool_server: Server) -> None:
    """With tools and a form the model chooses."""
    schema = tool("", ok={"type": "boolean"})["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = tool_server.post(CHAT, body(response_format=form)).json["choices"][0]
    if found["finish_reason"] == "tool_calls":
        check_calls(found["message"])
    else:
        jsonschema.validate(json.loads(found["message"]["content"]), schema)
    found = tool_server.post(CHAT, body(response_format=form, tool_choice="required")).json["choices"][0]
    check_calls(found["message"])
    found = tool_server.post(CHAT, body(response_format=form, tool_choice="none")).json["choices"][0]
    jsonschema.validate(json.loads(found["message"]["content"]), schema)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tools": "add"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "sql"}}]}, "tools"),
        ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": []}}]}, "tools"),
        ({"tools": [tool("a b")]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "divide"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [tool("f", x={"not": {}})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool("f", x={"enum": ["a" * 70_000]})], "tool_choice": "required"}, "tools"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"functions": [ADD["function"]]}, "functions"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_tools(tool_server: Server, values: dict[str, Any], field: str) -> None:
    for stream in (False, True):
        reply = tool_server.post(CHAT, body(stream=stream) | values)
        assert reply.status == 400, reply.data
        assert reply.error["param"] == field


def test_a_chat_format_without_a_place_for_tools(server: Server) -> None:
    reply = server.post(CHAT, chat(tools=BOTH))
    assert (reply.status, reply.error["param"], reply.error["code"]) == (
        400,
        "tools",
        "unsupported_parameter",
    )
    assert f"the chat format of {NAME} takes no tools" in reply.error["message"]
    assert server.post(CHAT, chat(tools=BOTH, tool_choice="none", max_tokens=1)).status == 200


def test_a_developer_is_the_system_and_no_path_is_explained(tool_server: Server, tool_engine: Path) -> None:
    talk = [
        {"role": "developer", "content": "ZEBRA"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "b"},
    ]
    values = {"messages": talk, "tools": None, "max_tokens": 1}
    reply = tool_server.request("POST", CHAT, body(**values), {**JSON, "X-Ingot-Explain": "1"})
    found = reply.json["ingot_explain"]
    assert found["prompt_text"].startswith("<|im_start|>system\nZEBRA<|im_end|>")
    assert "<|im_start|>assistant\nno<|im_end|>" in found["prompt_text"]
    assert found["chat_format"].startswith(f"the chat template in {TOOLS}/")
    assert str(tool_engine.parent).encode() not in reply.data


def test_thoughts_are_not_content(tool_server: Server, published: Schema) -> None:
    """The prompt opens the block and the model never closes it; or the prompt has closed it."""
    values = {"tools": None, "chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 12}
    whole = tool_server.post(CHAT, body(**values)).json
    published.check("CreateChatCompletionResponse", whole)
    message = whole["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    events = tool_server.events(CHAT, body(**values))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(one.get("reasoning_content", "") for one in deltas) == message["reasoning_content"]
    assert not any(one.get("content") for one in deltas)
    values["chat_template_kwargs"] = {"enable_thinking": False}
    message = tool_server.post(CHAT, body(**values)).json["choices"][0]["message"]
    assert message["content"]
    assert "reasoning_content" not in message


ANSWER = '<think>\nHm.\n</think>\n\nOK.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
TWO = ANSWER + '<tool_call>\n{"name": "g"}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_an_answer_is_parsed_however_it_is_split(size: int) -> None:
    parts = AnswerParts(thoughts="may", calls=True, most_calls=1)
    pieces = [TWO[i : i + size] for i in range(0, len(TWO), size)]
    found = [one for piece in pieces for one in parts.feed(piece, final=False)] + parts.feed("", final=True)
    kinds = list(dict.fromkeys(map(type, found)))
    assert kinds == [ReasoningDelta, ContentDelta, CallStart, ArgumentsDelta]
    assert (parts.reasoning, parts.content) == ("Hm.", "OK.")
    assert [(call.name, call.arguments) for call in parts.tool_calls] == [("f", '{"a": 1}')]
    assert [parts.finish_reason(one) for one in ("stop", "length", None)] == ["tool_calls", "length", None]


def test_unrequested_calls_stay_content() -> None:
    parts = AnswerParts(thoughts="no", calls=False, most_calls=None)
    assert parts.feed(ANSWER, final=True) == [ContentDelta(ANSWER)]
    assert parts.finish_reason("stop") == "stop"


@pytest.mark.parametrize("parallel", [None, True, False])
@pytest.mark.parametrize(("choice", "many"), [("required", True), ("auto", True), (NAMED, False)])
def test_a_tool_that_is_named_is_called_once(choice: Any, many: bool, parallel: bool | None) -> None:
    """Several calls are for who may choose among tools, and has not said that they may not be parallel."""
    many = many and parallel is not False
    use = read_tools(BOTH, choice, parallel, None)
    assert use.most_calls == (None if many else 1)
    if choice != "auto":
        assert use.form is not None
        value = use.form.grammar.value()
        assert value["parallel"] is many
        assert [*value["tools"]] == (["say"] if choice == NAMED else ["add", "say"])


def described(name: str, size: int) -> dict[str, Any]:
    """A tool whose JSON has about ``size`` bytes."""
    return tool(name, a={"type": "integer", "description": "a" * size})


@pytest.mark.parametrize(
    ("choice", "form", "sizes", "fits"),
    [
        (None, False, {"f": MAX_SCHEMA_BYTES, "g": MAX_SCHEMA_BYTES}, True),  # nothing is compiled of them
        ("none", True, {"f": MAX_SCHEMA_BYTES, "g": MAX_SCHEMA_BYTES}, True),
        ("auto", True, {"f": MAX_SCHEMA_BYTES, "g": 0}, False),
        ("auto", True, {"f": MAX_SCHEMA_BYTES // 3, "g": MAX_SCHEMA_BYTES // 3}, True),
        ("required", False, {"f": MAX_SCHEMA_BYTES // 3, "g": MAX_SCHEMA_BYTES // 3}, True),
        ("required", False, {"f": MAX_SCHEMA_BYTES // 2, "g": MAX_SCHEMA_BYTES // 2}, False),
        ("f", False, {"f": MAX_SCHEMA_BYTES // 2, "g": MAX_SCHEMA_BYTES}, True),  # only its own schema is
        ("f", False, {"f": MAX_SCHEMA_BYTES, "g": 0}, False),
    ],
)
def test_tools_are_as_large_as_what_is_compiled_of_them(
    choice: str | None, form: bool, sizes: dict[str, int], fits: bool
) -> None:
    named = {"type": "function", "function": {"name": choice}} if choice == "f" else choice
    tools = [described(name, size) for name, size in sizes.items()]
    held = AnswerFormat(Grammar.json_object(), "response_format") if form else None
    if fits:
        assert (read_tools(tools, named, None, held).form is None) == (choice is None)
        return
    with pytest.raises(ApiError, match=f"at most {MAX_SCHEMA_BYTES}") as caught:
        read_tools(tools, named, None, held)
    assert caught.value.param == "tools"
