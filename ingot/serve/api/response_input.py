"""The input of ``/v1/responses`` as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ingot.serve.api_errors import ApiError, bad_request, unsupported
from ingot.serve.media_parts import picture_places
from ingot.serve.request_schemas import ChatRequest, ResponsesRequest, Sampling

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
Message = dict[str, Any]


class AsChat(NamedTuple):
    """A request to ``/v1/chat/completions``, and where its pictures come from: ``messages[0].content[1]`` is
    ``input[2].content[0]``.
    """

    body: ChatRequest
    places: dict[str, str]


def as_chat(body: ResponsesRequest) -> AsChat:
    """The same request to ``/v1/chat/completions``; raises ApiError where an item, tool or format is
    malformed or not supported.
    """
    values = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    format = None if body.text is None else body.text.format
    if format is not None and format.get("type") == "json_schema":
        schema = {name: one for name, one in format.items() if name != "type"}
        format = {"type": "json_schema", "json_schema": schema}
    if format is not None:
        values["response_format"] = dict(format)
    values |= {"n": None, "max_tokens": None, "stream_options": None}
    if "message.output_text.logprobs" in (body.include or ()):
        raise unsupported("include", "a list of log-probabilities in a response")
    messages, pictures = _messages(body)
    places = (f"messages[{i}].content[{j}]" for i, j in picture_places(messages))
    tools = None if body.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    request = ChatRequest(
        **values,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return AsChat(request, dict(zip(places, pictures, strict=True)))


class _Conversation:
    """Messages so far, and the places of their ``pictures``; parts of an assistant's turn come as items of
    their own.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pictures: list[str] = []
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
        given, where = item.get("content"), f"{where}.content"
        if role == "assistant":
            self._assistant()["content"] = _text(given, where, _TEXTS)
        elif role == "user" and isinstance(given, list) and any(map(_is_picture, given)):
            self.messages.append({"role": role, "content": self._parts(given, where)})
        else:
            self.messages.append({"role": role, "content": _text(given, where, _TEXTS)})

    def _parts(self, given: list[Any], where: str) -> list[Message]:
        """The parts of a message with pictures; neighbouring texts become one."""
        found: list[Message] = []
        for place, part in enumerate(given):
            if _is_picture(part):
                name = f"{where}[{place}]"
                if part.get("file_id") is not None:
                    raise unsupported(name, "a stored file (send its bytes as a data URL in image_url)")
                found.append({"type": "image_url", "image_url": part.get("image_url")})
                self.pictures.append(name)
                continue
            text = _part_text(part, f"{where}[{place}]", _TEXTS)
            if found and found[-1]["type"] == "text":
                found[-1]["text"] += text
            else:
                found.append({"type": "text", "text": text})
        return found

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


def _messages(body: ResponsesRequest) -> tuple[list[Message], list[str]]:
    conversation = _Conversation()
    if isinstance(body.input, str):
        conversation.messages.append({"role": "user", "content": body.input})
    else:
        for place, item in enumerate(body.input):
            conversation.add(item, f"input[{place}]")
    messages, pictures = conversation.messages, conversation.pictures
    if body.instructions is None:
        return messages, pictures
    if messages and messages[0]["role"] == "system":  # templates take one
        first = messages[0] | {"content": f"{body.instructions}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]], pictures
    return [{"role": "system", "content": body.instructions}, *messages], pictures


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _text(content: Any, where: str, kinds: Mapping[str, str]) -> str:
    """A string, or the texts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts", where)
    return "".join(_part_text(part, f"{where}[{place}]", kinds) for place, part in enumerate(content))


def _part_text(part: Any, where: str, kinds: Mapping[str, str]) -> str:
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    text = part.get(kinds[kind]) if kind in kinds else None
    if not isinstance(text, str):
        raise bad_request(f"{where} is not a part of text", where)
    return text


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


def in_words_of_responses(error: ApiError, places: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """An error of the chat that the request became, with the names of the fields that it came from."""
    param = error.param or ""
    if param in places:
        error.message, error.param = error.message.replace(param, places[param]), places[param]
        return error
    names = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
    for theirs, ours in names.items():
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            error.param = ours  # the places in a conversation are not those of the items
            error.message = error.message.replace(theirs, ours)
    return error
