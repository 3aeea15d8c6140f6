"""LangChain's messages as a conversation, and answers as its messages.

Covers which messages and content blocks an engine takes.

    as_conversation([HumanMessage("Hi")])       # [{"role": "user", "content": "Hi"}]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import UsageMetadata

from ingot.adapters.langchain.langchain_images import Read, as_input, is_image
from ingot.errors import RequestError
from ingot.runtime.selection import TokenLogprobs
from ingot.text.tokenizer.tokenizer import Tokenizer

_CALLS = ("tool_call", "tool_use", "tool_call_chunk", "invalid_tool_call")  # the message has them beside
_THOUGHTS = ("reasoning", "reasoning_content", "thinking", "redacted_thinking")  # no part of a later prompt
_ROLES: dict[type[BaseMessage], str] = {
    HumanMessage: "user",
    AIMessage: "assistant",
    SystemMessage: "system",
    ToolMessage: "tool",
}


def as_conversation(messages: Sequence[BaseMessage], read: Read | None = None) -> list[dict[str, Any]]:
    """The messages as roles and texts, for the engine's chat format. Names of speakers are left out.

    Args:
        read: reads a picture, for an engine that takes pictures; content with one is a list of parts.

    Neighbours of the same role become one message, with an empty line between their texts: many chat formats
    refuse two in a row. Tool calls and results stay apart.

    Raises:
        RequestError: there are none, or one is of a function or holds something else than text.
    """
    if not messages:
        raise RequestError("the conversation is empty", allowed="at least one message", fix="messages")
    conversation: list[dict[str, Any]] = []
    for position, message in enumerate(messages, start=1):
        one = {
            "role": _role(message, position),
            "content": _content(message, position, read),
            **_of_tools(message),
        }
        last = conversation[-1] if conversation else {}
        if set(last) == set(one) == {"role", "content"} and last["role"] == one["role"]:
            last["content"] = _joined(last["content"], one["content"], "\n\n")
        else:
            conversation.append(one)
    return conversation


def _of_tools(message: BaseMessage) -> dict[str, Any]:
    """The calls of a message, or the call that it answers, as in the OpenAI API."""
    if isinstance(message, ToolMessage):
        name = {"name": message.name} if message.name else {}
        return {"tool_call_id": message.tool_call_id, **name}
    if not isinstance(message, AIMessage):
        return {}
    calls = [_call(c["id"], c["name"], json.dumps(c["args"])) for c in message.tool_calls]
    calls += [_call(c["id"], c["name"] or "", c["args"] or "") for c in message.invalid_tool_calls]
    return {"tool_calls": calls} if calls else {}


def _call(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _role(message: BaseMessage, position: int) -> str:
    if isinstance(message, FunctionMessage):
        raise RequestError(
            f"message {position}: functions are not taken", seen="FunctionMessage", fix="a ToolMessage"
        )
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise RequestError(
        f"message {position} is of an unknown kind",
        seen=type(message).__name__,
        allowed="HumanMessage, AIMessage, SystemMessage, ToolMessage, ChatMessage",
        fix="messages",
    )


def _content(message: BaseMessage, position: int, read: Read | None) -> str | list[dict[str, Any]]:
    content = message.content
    if isinstance(content, str):
        return content
    found: str | list[dict[str, Any]] = ""
    for block in content:
        if isinstance(block, str) or block.get("type") not in (*_CALLS, *_THOUGHTS):
            image = read is not None and is_image(block)
            part = [as_input(block, position, read)] if image else _block_text(block, position, read)  # type: ignore[arg-type]
            found = _joined(found, part)
    return found


def _joined(
    first: str | list[dict[str, Any]], second: str | list[dict[str, Any]], between: str = ""
) -> str | list[dict[str, Any]]:
    """Two contents as one; texts that meet are one text, with something between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    left, right = _parts(first), _parts(second)
    if left and right and left[-1]["type"] == right[0]["type"] == "text":
        text = f"{left.pop()['text']}{between}{right.pop(0)['text']}"
        left.append({"type": "text", "text": text})
    return [*left, *right]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [*content]


def _block_text(block: str | dict[Any, Any], position: int, read: Read | None) -> str:
    if isinstance(block, str):
        return block
    text = block.get("text")
    if block.get("type") != "text" or not isinstance(text, str):
        raise RequestError(
            f"message {position}: this engine takes {'text only' if read is None else 'text and images'}",
            seen=f"a content block of type {block.get('type')}",
            allowed='blocks of type text, {"type": "text", "text": "..."}',
            fix="the message's content",
        )
    return text


def usage(input_tokens: int, output_tokens: int) -> UsageMetadata:
    """Token counts of a request; an end token is in neither."""
    return UsageMetadata(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        total_tokens=input_tokens + output_tokens,
    )


def as_logprobs(logprobs: Iterable[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Log-probabilities in the shape of OpenAI's: ``content`` has one entry per token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = "" if tokenizer is None else tokenizer.token_text(token_id)
        return {"token": text, "token_id": token_id, "logprob": logprob}

    return {
        "content": [
            entry(one.token_id, one.logprob) | {"top_logprobs": [entry(*likely) for likely in one.top]}
            for one in logprobs
        ]
    }
