"""LangChain's messages as a conversation, and answers as its messages.

Owns which messages and content blocks an engine takes. Knows no engine.

    as_conversation([HumanMessage("Hi")])       # [{"role": "user", "content": "Hi"}]
"""

from __future__ import annotations

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

from ingot.errors import RequestError
from ingot.processors.tokenizer import Tokenizer
from ingot.runtime.selection import TokenLogprobs

NO_TOOLS = "tools are not supported yet"
_ROLES: dict[type[BaseMessage], str] = {
    HumanMessage: "user",
    AIMessage: "assistant",
    SystemMessage: "system",
}


def as_conversation(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """The messages as roles and texts, for the engine's chat format. Names of speakers are left out.

    Neighbours of the same role become one message, with an empty line between their texts: many chat formats
    refuse two in a row.

    Raises:
        RequestError: there are none, or one is of a tool, calls one, or holds something else than text.
    """
    if not messages:
        raise RequestError("the conversation is empty", allowed="at least one message", fix="messages")
    conversation: list[dict[str, str]] = []
    for position, message in enumerate(messages, start=1):
        role, text = _role(message, position), _text(message, position)
        if conversation and conversation[-1]["role"] == role:
            conversation[-1]["content"] += f"\n\n{text}"
        else:
            conversation.append({"role": role, "content": text})
    return conversation


def _role(message: BaseMessage, position: int) -> str:
    if isinstance(message, (ToolMessage, FunctionMessage)) or getattr(message, "tool_calls", None):
        raise RequestError(
            f"message {position}: {NO_TOOLS}", seen=type(message).__name__, fix="a conversation without tools"
        )
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise RequestError(
        f"message {position} is of an unknown kind",
        seen=type(message).__name__,
        allowed="HumanMessage, AIMessage, SystemMessage, ChatMessage",
        fix="messages",
    )


def _text(message: BaseMessage, position: int) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, position) for block in content)


def _block_text(block: str | dict[Any, Any], position: int) -> str:
    if isinstance(block, str):
        return block
    text = block.get("text")
    if block.get("type") != "text" or not isinstance(text, str):
        raise RequestError(
            f"message {position}: this engine takes text only",
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
