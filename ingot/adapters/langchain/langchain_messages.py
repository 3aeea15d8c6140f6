"""LangChain's messages as a conversation, and answers as its messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from ingot.errors import RequestError
from ingot.runtime.selection import TokenLogprobs
from ingot.text.prompt import Input
from ingot.text.tokenizer.tokenizer import Tokenizer

Read = Callable[[str], Input]  # of a picture's data URL
_ALLOWED = 'a data URL: {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}, or base64'
_CALLS = ("tool_call", "tool_use", "tool_call_chunk", "invalid_tool_call")  # the message also has them itself
_THOUGHTS = ("reasoning", "reasoning_content", "thinking", "redacted_thinking")  # not part of a later prompt
_ROLES: dict[type[BaseMessage], str] = {
    HumanMessage: "user",
    AIMessage: "assistant",
    SystemMessage: "system",
    ToolMessage: "tool",
}


def as_conversation(messages: Sequence[BaseMessage], read: Read | None = None) -> list[dict[str, Any]]:
    """The messages as roles and texts, for the engine's chat format. Names of speakers are left out.

    Neighbours of the same role become one message, with an empty line between their texts: many chat formats
    refuse two in a row. Tool calls and results stay apart. With ``read``, which reads pictures for an engine
    that takes them, content with one is a list of parts.

    Raises:
        RequestError: there are none, or one is of a function or holds something else than text.
    """
    if not messages:
        raise RequestError("the conversation is empty", allowed="at least one message", fix="messages")
    conversation: list[dict[str, Any]] = []
    for position, message in enumerate(messages, start=1):
        one: dict[str, Any] = {"role": _role(message, position), "content": _content(message, position, read)}
        if isinstance(message, ToolMessage):
            one |= {"tool_call_id": message.tool_call_id} | ({"name": message.name} if message.name else {})
        elif isinstance(message, AIMessage):
            calls = [_call(c["id"], c["name"], json.dumps(c["args"])) for c in message.tool_calls]
            calls += [_call(c["id"], c["name"] or "", c["args"] or "") for c in message.invalid_tool_calls]
            one |= {"tool_calls": calls} if calls else {}
        last = conversation[-1] if conversation else {}
        if set(last) == set(one) == {"role", "content"} and last["role"] == one["role"]:
            last["content"] = _joined(last["content"], one["content"], "\n\n")
        else:
            conversation.append(one)
    return conversation


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
    found: str | list[dict[str, Any]] = ""
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str):
            found = _joined(found, block)
            continue
        kind, text = block.get("type"), block.get("text")
        if kind in (*_CALLS, *_THOUGHTS):
            continue
        if read is not None and kind in ("image_url", "image", "input_image"):
            found = _joined(found, [_image(block, position, read)])
        elif kind == "text" and isinstance(text, str):
            found = _joined(found, text)
        else:
            raise RequestError(
                f"message {position}: this engine takes {'text only' if read is None else 'text and images'}",
                seen=f"a content block of type {kind}",
                allowed='blocks of type text, {"type": "text", "text": "..."}',
                fix="the message's content",
            )
    return found


def _image(block: Mapping[str, Any], position: int, read: Read) -> dict[str, Any]:
    """A picture in LangChain's or OpenAI's shape as part of a message; a RequestError names the message."""
    try:
        url = block.get("url", block.get("image_url"))
        url = url.get("url") if isinstance(url, Mapping) else url
        given = block.get("base64", block.get("data"))
        if isinstance(given, str):
            url = f"data:;base64,{given}"  # the content says what it is
        if not isinstance(url, str) or url[:5].lower() != "data:":
            seen = url[:80] if isinstance(url, str) else sorted(map(str, block))
            what = "a picture must be a data URL or base64: nothing is fetched, and no file is read"
            raise RequestError(what, seen=seen, allowed=_ALLOWED)
        return {"type": "input", "input": read(url)}
    except RequestError as error:
        what = f"message {position}: {error.what}"
        raise RequestError(what, seen=error.seen, allowed=error.allowed, fix=error.fix) from None


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


def usage(input_tokens: int, output_tokens: int) -> UsageMetadata:
    """Token counts of a request; an end token is in neither."""
    total = input_tokens + output_tokens
    return UsageMetadata(input_tokens=input_tokens, output_tokens=output_tokens, total_tokens=total)


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
