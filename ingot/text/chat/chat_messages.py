"""A conversation as requests send it.

Covers the checks on messages and the flattening of text parts.

    check_messages([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])[0]["content"] == "Hi"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.config.files.json_text import parse_json
from ingot.errors import RequestError
from ingot.text.prompt import Input

Message = dict[str, Any]
PLAIN_ROLES = ("system", "developer", "user", "assistant")
TEMPLATE_ROLES = (*PLAIN_ROLES, "tool")


def check_messages(
    messages: Sequence[Mapping[str, Any]], roles: Sequence[str] = PLAIN_ROLES, *, inputs: bool = False
) -> list[Message]:
    """Copies of the messages with their content as one string; with ``inputs`` that of a message which has
    parts ``{"type": "input", "input": Input(…)}`` is a list of strings and inputs.

    A message that carries ``tool_calls`` may have no content; that of one with a ``refusal`` is the refusal.
    Other keys are kept for templates.

    Raises:
        RequestError: no messages, an unknown role, or content that is no text; it names the message.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list of objects", seen=messages, field="messages")
    return [_checked(message, f"messages[{i}]", roles, inputs) for i, message in enumerate(messages)]


def without_developer(messages: list[Message]) -> list[Message]:
    """The messages with the developer's as the system's, for formats that have no such role.

    Formats take one system message at the start: a developer's message behind it joins it.
    """
    found: list[Message] = []
    for message in messages:
        if message["role"] != "developer":
            found.append(message)
        elif len(found) == 1 and found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{message['content']}"}
        else:
            found.append({**message, "role": "system"})
    return found


def check_turns(messages: list[Message], *, add_generation_prompt: bool) -> None:
    """The order that formats without a template can express: a system message first, then user and assistant.

    Raises:
        RequestError: a system message later on, an answer before any question, or nothing left to answer.
    """
    for i, message in enumerate(messages[1:], start=1):
        if message["role"] == "system":
            where = f"messages[{i}]"
            raise RequestError(
                "only the first message may be the system's", seen=where, field=f"{where}.role"
            )
    turns = [message["role"] for message in messages if message["role"] != "system"]
    if turns and turns[0] != "user":
        raise RequestError(
            "the first message after the system's must be the user's", seen=turns[0], field="messages"
        )
    if add_generation_prompt and (not turns or turns[-1] != "user"):
        raise RequestError("the last message must be the user's", seen=messages[-1]["role"], field="messages")


def with_arguments(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of tool calls as objects, which templates write as JSON again.

    The API has them as JSON text. Text that is no JSON object stays text.
    """
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), (list, tuple))
        else message
        for message in messages
    ]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        value = parse_json(arguments)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


def _checked(message: Mapping[str, Any], where: str, roles: Sequence[str], inputs: bool) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", seen=message, field="messages")
    role = message.get("role")
    if role not in roles:
        raise RequestError(
            f"{where}.role is not one of the roles", seen=role, allowed=list(roles), field=f"{where}.role"
        )
    content = message.get("content")
    if content is None and role == "assistant" and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    if content is None and message.get("tool_calls"):
        return dict(message)
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    where = f"{where}.content"
    if inputs and isinstance(content, (list, tuple)) and any(map(_input, content)):
        parts = [_input(part) or _part(part, f"{where}[{i}]", kinds) for i, part in enumerate(content)]
        return {**message, "content": parts}
    return {**message, "content": _text(content, where, kinds)}


def _input(part: Any) -> Input | None:
    """That of a part which has one."""
    found = part.get("input") if isinstance(part, Mapping) and part.get("type") == "input" else None
    return found if isinstance(found, Input) else None


def _text(content: Any, where: str, kinds: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        allowed = 'a string or a list of {"type": "text", "text": ...}'
        raise RequestError(f"{where} is not text", seen=type(content).__name__, allowed=allowed, field=where)
    return "".join(_part(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def _part(part: Any, where: str, kinds: Sequence[str]) -> str:
    """The text of a part, which stands under the name of its kind."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind not in kinds:
        allowed = " or ".join(f'"type": "{one}"' for one in kinds)
        raise RequestError(f"{where} is not a text part", seen=kind, allowed=allowed, field=where)
    text = part.get(str(kind))
    if not isinstance(text, str):
        raise RequestError(f"{where}.{kind} must be a string", seen=type(text).__name__, field=where)
    return text
