"""An answer's parts as messages and deltas of ``/v1/chat/completions``.

Covers their shape.

    delta(CallStart(0, "call_1", "add"))["tool_calls"][0]["function"]["name"] == "add"
"""

from __future__ import annotations

from typing import Any

from ingot.serve.api.answer_parts import (
    AnswerParts,
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Part,
    ReasoningDelta,
)


def message(parts: AnswerParts) -> dict[str, Any]:
    """The message of a whole answer; ``reasoning_content`` where there are thoughts."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in parts.tool_calls
    ]
    content = None if calls and not parts.content else parts.content
    found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if parts.reasoning:
        found["reasoning_content"] = parts.reasoning
    if calls:
        found["tool_calls"] = calls
    return found


def delta(part: Part) -> dict[str, Any]:
    """What one part adds to a message."""
    match part:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case CallStart(index, name, function):
            call = {"index": index, "id": name, "type": "function"}
            return {"tool_calls": [call | {"function": {"name": function, "arguments": ""}}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
