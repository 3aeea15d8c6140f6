"""``bind_tools`` and ``with_structured_output``: calls, whole and in pieces, and back in a prompt."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from ingot import LLM
from ingot.adapters.langchain.langchain_messages import as_conversation
from ingot.adapters.langchain.langchain_tools import ToolUse, as_chunk
from ingot.errors import RequestError
from ingot.langchain import ChatIngot
from tests.langchain.conftest import POCKET

TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
Small = Literal[1, 2, 3]  # a small model would write digits without end


@tool
def add(a: Small, b: Small) -> int:
    """Add two numbers."""
    return a + b


class Colour(BaseModel):
    """A colour."""

    name: str = Field(pattern="^(red|green)$")
    depth: Small


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatIngot:
    """The pocket model with a template that reads tools."""
    folder = Path(shutil.copytree(POCKET, tmp_path_factory.mktemp("tools") / "pocket"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ChatIngot(model=LLM(folder, device="cpu"), temperature=0, max_tokens=200)


def use() -> ToolUse:
    return ToolUse.of({"tools": [add]})[0]


@pytest.mark.stays("required", "add")
@pytest.mark.parametrize(
    "choice", ["any", "required", True, "add", {"type": "function", "function": {"name": "add"}}]
)
def test_a_demanded_call_is_made(chat: ChatIngot, choice: Any) -> None:
    bound = chat.bind_tools([add, Colour], tool_choice=choice, parallel_tool_calls=False)
    message = bound.invoke("What is 1 + 2?")
    assert message.tool_calls
    assert message.response_metadata["finish_reason"] == "tool_calls"
    for call in message.tool_calls:
        if call["name"] == "add":
            assert isinstance(add.invoke(call["args"]), int)
        else:
            Colour(**call["args"])
    if choice not in ("any", "required", True):
        assert {call["name"] for call in message.tool_calls} == {"add"}


def test_a_stream_gives_the_same_calls(chat: ChatIngot) -> None:
    bound = chat.bind_tools([add], tool_choice="any", parallel_tool_calls=False)
    whole = bound.invoke("What is 1 + 2?")
    joined = AIMessageChunk(content="")
    for chunk in bound.stream("What is 1 + 2?"):
        joined += chunk
    calls = [(c["name"], c["args"]) for c in joined.tool_calls]
    assert calls == [(c["name"], c["args"]) for c in whole.tool_calls]
    assert len(calls) == 1
    assert joined.usage_metadata == whole.usage_metadata
    assert joined.response_metadata["finish_reason"] == "tool_calls"
    again = asyncio.run(bound.ainvoke("What is 1 + 2?"))
    assert [c["args"] for c in again.tool_calls] == [c["args"] for c in whole.tool_calls]


def test_structured_output(chat: ChatIngot) -> None:
    found = chat.with_structured_output(Colour).invoke("Which colour?")
    assert isinstance(found, Colour)
    both = chat.with_structured_output(Colour.model_json_schema(), include_raw=True).invoke("Which colour?")
    assert Colour(**both["parsed"])
    assert both["parsing_error"] is None


def test_calls_and_results_go_back_into_the_prompt(chat: ChatIngot) -> None:
    call = {"name": "add", "args": {"a": 1, "b": 2}, "id": "1"}
    talk = [HumanMessage("Add."), AIMessage("", tool_calls=[call]), ToolMessage("3", tool_call_id="1")]
    tools = [add]
    count = chat.get_num_tokens_from_messages(talk, tools=tools)
    assert count > chat.get_num_tokens_from_messages(talk) > chat.get_num_tokens_from_messages(talk[:1])
    assert chat.bind_tools(tools).invoke(talk).usage_metadata["input_tokens"] == count


def test_without_tools_a_call_is_text_and_with_them_it_may_be_none(chat: ChatIngot) -> None:
    assert ToolUse().message(CALL).content == CALL
    assert chat.bind_tools([add], tool_choice="none").invoke("What is 12 + 30?").tool_calls == []
    plain = use().message("No call.")
    assert (plain.content, plain.tool_calls) == ("No call.", [])


def test_pieces_of_any_size_give_the_same_message() -> None:
    text = f"I add.{CALL}{CALL}"
    whole = use().message(text)
    assert [c["args"] for c in whole.tool_calls] == [{"a": 1, "b": 2}] * 2
    for size in (1, 3, 1000):
        parts, joined = use().parts(), AIMessageChunk(content="")
        for start in range(0, len(text), size):
            joined += as_chunk(parts.feed(text[start : start + size], final=start + size >= len(text)))
        assert parts.tool_calls
        assert joined.content == whole.content == "I add."
        assert [(c["name"], c["args"]) for c in joined.tool_calls] == [("add", {"a": 1, "b": 2})] * 2


def test_broken_arguments_are_reported() -> None:
    message = use().message('<tool_call>{"name": "add", "arguments": {"a": 1,</tool_call>')
    assert message.tool_calls == []
    assert message.invalid_tool_calls[0]["name"] == "add"


def test_arguments_without_end_are_reported() -> None:
    """As deep as a small model may go, and deeper than JSON is read."""
    deep = "[" * 100_000 + "]" * 100_000
    message = use().message(f'<tool_call>{{"name": "add", "arguments": {deep}}}</tool_call>')
    assert (message.tool_calls, message.invalid_tool_calls[0]["args"]) == ([], deep)


def test_one_call_at_most_where_the_model_decides() -> None:
    one = ToolUse.of({"tools": [add], "parallel_tool_calls": False})[0]
    text = f"I add.{CALL}{CALL} So."
    assert len(one.message(text).tool_calls) == 1
    for size in (1, 1000):
        parts, joined = one.parts(), AIMessageChunk(content="")
        for start in range(0, len(text), size):
            joined += as_chunk(parts.feed(text[start : start + size], final=start + size >= len(text)))
        assert [(c["name"], c["args"]) for c in joined.tool_calls] == [("add", {"a": 1, "b": 2})]
        assert joined.content == "I add. So."


@pytest.mark.slow
def test_a_parameter_may_be_called_properties(chat: ChatIngot) -> None:
    """What a schema says of names and values is not taken for a schema."""
    value = {"properties": {"a": 1}}
    parameters = {
        "type": "object",
        "properties": {"properties": {"enum": [value]}, "more": {"type": "object", "properties": {}}},
        "required": ["properties", "additionalProperties"],
    }
    parameters["properties"]["additionalProperties"] = {"const": 1}  # type: ignore[index]
    tool = {"type": "function", "function": {"name": "set", "parameters": parameters}}
    bound = chat.bind_tools([tool], tool_choice="set", parallel_tool_calls=False)
    (call,) = bound.invoke("Set.").tool_calls
    assert (call["args"]["properties"], call["args"]["additionalProperties"]) == (value, 1)


def test_a_call_that_was_invalid_is_shown_to_the_model() -> None:
    wrong = use().message('<tool_call>{"name": "add", "arguments": {"a": 1,</tool_call>')
    (asked,) = as_conversation([wrong])
    (call,) = asked["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1,'}
    assert call["id"] == wrong.invalid_tool_calls[0]["id"]


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([add], "other", "tool_choice names no tool"),
        ([add], {"type": "tool", "name": "add"}, "tool_choice"),
        ([add], {"type": "function", "function": "add"}, "tool_choice"),
        ([add], 7, "tool_choice"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "name"),
        ([{"type": "web_search_preview"}], "any", "is not a function"),
        ([{"type": "function"}], "any", "is not a function"),
    ],
)
def test_what_is_refused(chat: ChatIngot, tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        chat.bind_tools(tools, tool_choice=choice).invoke("Hi")


def test_a_template_that_reads_no_tools_says_so(pocket: LLM) -> None:
    with pytest.raises(RequestError, match="tools"):
        ChatIngot(model=pocket).bind_tools([add]).invoke("Hi")


def test_functions_are_not_taken(chat: ChatIngot) -> None:
    with pytest.raises(RequestError, match="functions"):
        chat.invoke("Hi", functions=[json.loads("{}")])
