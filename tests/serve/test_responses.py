"""``/v1/responses``: answers and events as OpenAI publishes them, over the same chat."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ingot.serve.api.response_input import as_chat
from ingot.serve.request_schemas import ResponsesRequest
from tests.serve.client import PATIENCE, Server
from tests.serve.conftest import MAX_SEQ_LEN, TOOLS, chat
from tests.serve.published import Schema
from tests.serve.test_formats import JSON_SCHEMA, SCHEMA, check
from tests.serve.test_tools import BOTH

RESPONSES = "/v1/responses"
FUNCTIONS = [{"type": "function", "strict": None, **tool["function"]} for tool in BOTH]
FORMAT = {"type": "json_schema", **JSON_SCHEMA["json_schema"]}
CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1, "b": 2}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
ASKED: dict[str, dict[str, Any]] = {
    "text": {},
    "instructions": {"instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "seed": 1},
    "cut": {"max_output_tokens": 3},
    "calls": {"tools": FUNCTIONS, "tool_choice": "required"},
    "one call": {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "say"}},
    "auto": {"tools": FUNCTIONS, "parallel_tool_calls": False, "metadata": {"a": "b"}},
    "form": {
        "text": {"format": FORMAT, "verbosity": "low"},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "thoughts": {
        "input": "Tell me a story about a fox.",
        "chat_template_kwargs": {"enable_thinking": True},
        "max_output_tokens": 4,
    },
    "accepted": {"reasoning": {"effort": "low"}, "store": True, "include": ["reasoning.encrypted_content"]},
}


def body(input: Any = "What is 12 + 30?", **values: Any) -> dict[str, Any]:
    return {"model": TOOLS, "input": input, "max_output_tokens": 150, **values}


def without_ids(value: Any) -> Any:
    """A response, or a part of one, without what differs between two equal ones."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    random = ("id", "call_id", "created_at", "completed_at")
    return {key: without_ids(one) for key, one in value.items() if key not in random}


@pytest.mark.stays("text", "one call", "accepted")
@pytest.mark.parametrize("name", ASKED)
def test_a_response_and_its_stream(tool_server: Server, published: Schema, name: str) -> None:
    """Both say the same; the events come in OpenAI's order, and put together they make the response."""
    values = ASKED[name]
    reply = tool_server.post(RESPONSES, body(**values))
    assert reply.status == 200, reply.data
    whole = reply.json
    published.check("Response", whole)
    assert whole["status"] == ("incomplete" if name in ("cut", "thoughts") else "completed")
    assert whole["store"] is False
    events = list(tool_server.stream(RESPONSES, body(**values)))
    for event in events:
        published.check("ResponseStreamEvent", event)
        published.check(COMPONENTS[event["type"]], event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, second, *inner, last = events
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert last["type"] == f"response.{whole['status']}"
    assert without_ids(last["response"]) == without_ids(whole)
    assert {event["response"]["id"] for event in (first, second, last)} == {last["response"]["id"]}
    assert put_together(inner) == last["response"]["output"]


def put_together(events: list[Any]) -> list[Any]:
    """The items that events describe; each event fits those before it."""
    items: list[Any] = []
    for event in events:
        kind, place = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert place == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            continue
        item = items[place]
        assert place == len(items) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        match kind:
            case "content_part.added":
                assert item["content"] == []
                item["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert item["content"][0]["text"] == event["text"]
            case "content_part.done":
                assert item["content"][0] == event["part"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            case "output_item.done":
                assert {**item, "status": event["item"]["status"]} == event["item"]
                items[place] = event["item"]
            case _:
                raise AssertionError(kind)
    return items


COMPONENTS = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
}


def test_it_is_the_chat(tool_server: Server) -> None:
    """The same text, calls, thoughts and counts of tokens."""

    def texts(output: list[Any], kind: str) -> str:
        return "".join(one["content"][0]["text"] for one in output if one["type"] == kind)

    for values in ({}, {"chat_template_kwargs": {"enable_thinking": True}}, {"tool_choice": "required"}):
        asked = {"model": TOOLS, "tools": BOTH, **values}
        whole = tool_server.post("/v1/chat/completions", {**chat(max_tokens=100), **asked}).json
        response = tool_server.post(
            RESPONSES, body(max_output_tokens=100, **asked | {"tools": FUNCTIONS})
        ).json
        message, output = whole["choices"][0]["message"], response["output"]
        assert texts(output, "message") == (message["content"] or "")
        assert texts(output, "reasoning") == message.get("reasoning_content", "")
        calls = [(one["name"], one["arguments"]) for one in output if one["type"] == "function_call"]
        functions = [call["function"] for call in message.get("tool_calls", [])]
        assert calls == [(one["name"], one["arguments"]) for one in functions]
        assert response["usage"]["input_tokens"] == whole["usage"]["prompt_tokens"]
        assert response["usage"]["output_tokens"] == whole["usage"]["completion_tokens"]


def test_items_become_a_conversation(tool_server: Server) -> None:
    """Of the shapes that clients send back: the prompt is that of the same messages in a chat."""
    text = [{"type": "input_text", "text": "Add 1 "}, {"type": "input_text", "text": "and 2."}]
    said = {"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": text},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [said]},
        {"id": "fc_1", "status": "completed", **CALL},
        {**CALL, "call_id": "call_2"},
        RESULT,
        {**RESULT, "call_id": "call_2", "output": [{"type": "input_text", "text": "3"}]},
    ]
    function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    calls = [{"id": f"call_{i}", "type": "function", "function": function} for i in (1, 2)]
    messages = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": "Wait.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "call_2", "name": "add", "content": "3"},
    ]
    values = {"model": TOOLS, "logprobs": True}
    whole = tool_server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 20, **values}).json
    asked = body(items, instructions="Be brief.", max_output_tokens=20)
    response = tool_server.post(RESPONSES, asked).json
    assert response["usage"]["input_tokens"] == whole["usage"]["prompt_tokens"]
    assert response["output"][0]["content"][0]["text"] == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"content": "Hi"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [CALL, {"type": "function_call_output", "output": "3"}]}, "input[1].call_id"),
        ({"input": "word " * 5000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": MAX_SEQ_LEN}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "divide"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_refused(tool_server: Server, values: dict[str, Any], field: str) -> None:
    for stream in (False, True):
        reply = tool_server.post(RESPONSES, body(stream=stream) | values)
        assert reply.status == 400, reply.data
        assert reply.error["param"] == field
        assert reply.error["message"]


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    )


def test_openais_client(tool_server: Server) -> None:
    """Text, a stream that it puts together itself, and a form."""
    with client(tool_server) as api:
        response = api.responses.create(model=TOOLS, input="What is 12 + 30?", max_output_tokens=30)
        assert response.output_text
        with api.responses.stream(model=TOOLS, input="What is 12 + 30?", max_output_tokens=30) as stream:
            text = "".join(one.delta for one in stream if one.type == "response.output_text.delta")
            assert stream.get_final_response().output_text == text == response.output_text
        form: Any = {"format": FORMAT}
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        found = api.responses.create(
            model=TOOLS, input="Name one.", text=form, max_output_tokens=60, extra_body=quiet
        )
        check(found.output_text, "schema")
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(response.id)


def test_openais_client_and_a_function(tool_server: Server) -> None:
    """The model calls, the program answers, the model speaks."""
    tools: Any = FUNCTIONS
    with client(tool_server) as api:
        choice: Any = {"type": "function", "name": "add"}
        first = api.responses.create(
            model=TOOLS, input="Add 1 and 2.", tools=tools, tool_choice=choice, max_output_tokens=100
        )
        (call,) = (item for item in first.output if item.type == "function_call")
        result = sum(json.loads(call.arguments).values())
        items: Any = [{"role": "user", "content": "Add 1 and 2."}, *first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})
        second = api.responses.create(model=TOOLS, input=items, tools=tools, max_output_tokens=40)
        assert second.status in ("completed", "incomplete")
        assert second.output


def test_the_schema_of_a_form_is_the_chats(tool_server: Server) -> None:
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    response = tool_server.post(RESPONSES, body(text={"format": FORMAT}, **quiet)).json
    check(response["output"][0]["content"][0]["text"], "schema")
    assert response["text"]["format"]["schema"] == SCHEMA


def test_thoughts_precede_the_call_that_follows_them() -> None:
    """A call joins the turn before it, unless thoughts have begun another."""
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"role": "assistant", "content": "Let me see."}
    turns = as_chat(ResponsesRequest(model="m", input=[said, thoughts, CALL, CALL, RESULT])).body.messages
    assert [(one["role"], one.get("reasoning_content")) for one in turns] == [
        ("assistant", None),
        ("assistant", "Hm."),
        ("tool", None),
    ]
    assert [len(one.get("tool_calls", ())) for one in turns] == [0, 2, 0]
    joined = as_chat(ResponsesRequest(model="m", input=[thoughts, said, CALL])).body.messages
    assert [(one["content"], one["reasoning_content"], len(one["tool_calls"])) for one in joined] == [
        ("Let me see.", "Hm.", 1)
    ]
