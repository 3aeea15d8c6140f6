"""The input of ``/v1/responses`` as a chat.

Owns the kinds of items and where each goes in a conversation. Knows no engine.

    as_chat(ResponsesRequest(model="m", input="Hi")).messages == [{"role": "user", "content": "Hi"}]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.serve.errors import ApiError, bad_request, unsupported
from ingot.serve.schemas import ChatRequest, ResponsesRequest, Sampling

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
Message = dict[str, Any]


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request to ``/v1/chat/completions``.

    Raises:
        ApiError: an item, tool or format is malformed or not supported.
    """
    values = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    format = None if body.text is None else body.text.format
    if format is not None:
        values["response_format"] = _format(format)
    values |= {"n": None, "max_tokens": None, "stream_options": None}
    if "message.output_text.logprobs" in (body.include or ()):
        raise unsupported("include", "a list of log-probabilities in a response")
    return ChatRequest(
        **values,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=None
        if body.tools is None
        else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
    )


class _Conversation:
    """Messages so far; parts of one turn of the assistant come as items of their own."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._names: dict[str, str] = {}  # of functions, by the id of the call
        self._thoughts = ""

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._output(item, where)
        elif kind == "reasoning":
            self._thoughts += _text(item.get("content") or [], f"{where}.content", {"reasoning_text": "text"})
        elif kind == "item_reference":
            raise unsupported(where, "a reference to a stored item")
        else:
            raise unsupported(where, f"an item of type {kind!r:.80}")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise bad_request(
                f"{where}.role: {role!r:.80} is not one of {', '.join(_ROLES)}", f"{where}.role"
            )
        content = _text(item.get("content"), f"{where}.content", _TEXTS)
        if role == "assistant":
            self._assistant()["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        values = {name: _string(item, name, where) for name in ("call_id", "name", "arguments")}
        self._names[values["call_id"]] = values["name"]
        last = self.messages[-1] if self.messages else None
        turn = last if last is not None and last["role"] == "assistant" and not self._thoughts else None
        turn = self._assistant() if turn is None else turn
        function = {"name": values["name"], "arguments": values["arguments"]}
        call = {"id": values["call_id"], "type": "function", "function": function}
        turn["tool_calls"] = [*turn.get("tool_calls", []), call]

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        content = _text(item.get("output"), f"{where}.output", _TEXTS)
        name = {"name": self._names[call_id]} if call_id in self._names else {}
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content} | name)

    def _assistant(self) -> Message:
        """A new message of the assistant, with the thoughts before it."""
        thoughts = {"reasoning_content": self._thoughts} if self._thoughts else {}
        self._thoughts = ""
        self.messages.append({"role": "assistant", "content": ""} | thoughts)
        return self.messages[-1]


def _messages(body: ResponsesRequest) -> list[Message]:
    conversation = _Conversation()
    if isinstance(body.input, str):
        conversation.messages.append({"role": "user", "content": body.input})
    else:
        for place, item in enumerate(body.input):
            conversation.add(item, f"input[{place}]")
    messages = conversation.messages
    if body.instructions is None:
        return messages
    if messages and messages[0]["role"] == "system":  # templates take one
        first = messages[0] | {"content": f"{body.instructions}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": body.instructions}, *messages]


def _text(content: Any, where: str, kinds: Mapping[str, str]) -> str:
    """A string, or the texts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts", where)
    found = []
    for place, part in enumerate(content):
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        text = part.get(kinds[kind]) if kind in kinds else None
        if not isinstance(text, str):
            raise bad_request(f"{where}[{place}] is not a part of text", f"{where}[{place}]")
        found.append(text)
    return "".join(found)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", f"{where}.{name}")
    return value


def _tool(tool: Mapping[str, Any], where: str) -> Message:
    """The API has a function's fields beside its type here, and inside ``function`` in chats."""
    if tool.get("type") != "function":
        raise unsupported(where, f"a tool of type {tool.get('type')!r:.80}")
    return {"type": "function", "function": {name: one for name, one in tool.items() if name != "type"}}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(format: Mapping[str, Any]) -> Message:
    if format.get("type") != "json_schema":
        return dict(format)
    return {"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}}


def in_words_of_responses(error: ApiError) -> ApiError:
    """An error of the chat that the request became, with the names of the fields that it came from."""
    names = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
    param = error.param or ""
    for theirs, ours in names.items():
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            error.param = ours  # the places in a conversation are not those of the items
            error.message = error.message.replace(theirs, ours)
    return error
