"""Checks on the messages of a conversation, and their text parts joined."""

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
    """Copies of the messages, each with its content as one string. With ``inputs``, the content of a message
    that has parts ``{"type": "input", "input": Input(…)}`` is a list of strings and inputs.

    A message with ``tool_calls`` may have no content; a ``refusal`` becomes the content. Other keys are kept
    for templates.

    Raises:
        RequestError: no messages, an unknown role, or content that is not text; it names the message.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list of objects", seen=messages, field="messages")
    return [_checked(message, f"messages[{i}]", roles, inputs) for i, message in enumerate(messages)]


def with_system(messages: Sequence[Any], system: str | None) -> list[Any]:
    """The messages after one of the system with this text; unchanged where it is None, or where the first is
    the system's (or a developer's) already.
    """
    first = messages[0] if messages else None
    own = isinstance(first, Mapping) and first.get("role") in ("system", "developer")
    if system is None or own:
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def without_developer(messages: list[Message]) -> list[Message]:
    """The messages with the developer's as the system's, for formats without such a role. Formats take one
    system message at the start: a developer's message right after it joins it.
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
    """Check the order for formats without a template: a system message first, then user and assistant. Raises
    ``RequestError`` if there is a later system message, an answer before any question, or nothing to answer.
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
    """The messages with the arguments of tool calls, JSON text in the API, as the objects that templates
    take. Text that is not a JSON object stays text.
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
    if isinstance(content, str):
        return {**message, "content": content}
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    where = f"{where}.content"
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        allowed = 'a string or a list of {"type": "text", "text": ...}'
        raise RequestError(f"{where} is not text", seen=type(content).__name__, allowed=allowed, field=where)
    if inputs and any(map(_input, content)):
        parts = [_input(part) or _part(part, f"{where}[{i}]", kinds) for i, part in enumerate(content)]
        return {**message, "content": parts}
    texts = [_part(part, f"{where}[{i}]", kinds) for i, part in enumerate(content)]
    return {**message, "content": "".join(texts)}


def _input(part: Any) -> Input | None:
    """The part's input, if it has one."""
    found = part.get("input") if isinstance(part, Mapping) and part.get("type") == "input" else None
    return found if isinstance(found, Input) else None


def _part(part: Any, where: str, kinds: Sequence[str]) -> str:
    """The text of a part, under the key named like its kind."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind not in kinds:
        allowed = " or ".join(f'"type": "{one}"' for one in kinds)
        raise RequestError(f"{where} is not a text part", seen=kind, allowed=allowed, field=where)
    text = part.get(str(kind))
    if not isinstance(text, str):
        raise RequestError(f"{where}.{kind} must be a string", seen=type(text).__name__, field=where)
    return text
