"""An answer's text taken apart while it comes: thoughts, content, tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.config.grammar_spec import Thinking
from ingot.text.parsing.thinking import ThinkingSplitter, ThoughtSplit
from ingot.text.parsing.tool_calls import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Delta,
    ToolCallParser,
    new_call_id,
)


@dataclass(frozen=True)
class ReasoningDelta:
    """More text of the thoughts."""

    text: str


Part = ReasoningDelta | Delta


@dataclass
class WholeCall:
    """A call so far."""

    id: str
    name: str
    arguments: str = ""


class AnswerParts:
    """A parser of one answer's text; ``reasoning``, ``content`` and ``tool_calls`` are what has come so far.

    Args:
        thoughts: whether the answer may begin with thoughts, or continues those that the prompt opened.
        calls: the request has tools.
        most_calls: calls beyond these are dropped.
    """

    def __init__(self, *, thoughts: Thinking, calls: bool, most_calls: int | None) -> None:
        self.reasoning = self.content = ""
        self.tool_calls: list[WholeCall] = []
        self._thinking = None if thoughts == "no" else ThinkingSplitter(opened=thoughts == "must")
        self._calls = ToolCallParser(new_call_id) if calls else None
        self._most_calls = most_calls

    def feed(self, text: str, *, final: bool) -> list[Part]:
        """The parts that ``text`` completes; ``final``: nothing comes after it."""
        split = ThoughtSplit("", text)
        if self._thinking is not None:
            split = self._thinking.feed(text)
            rest = self._thinking.flush() if final else ThoughtSplit()
            split = ThoughtSplit(split.reasoning + rest.reasoning, split.content + rest.content)
        parts: list[Part] = [ReasoningDelta(split.reasoning)] if split.reasoning else []
        if self._calls is None:
            parts += [ContentDelta(split.content)] if split.content else []
        else:
            found = self._calls.feed(split.content) + (self._calls.flush() if final else [])
            most = self._most_calls
            parts += [p for p in found if isinstance(p, ContentDelta) or most is None or p.index < most]
        for part in parts:
            match part:
                case ReasoningDelta(text):
                    self.reasoning += text
                case ContentDelta(text):
                    self.content += text
                case CallStart(_, name, function):
                    self.tool_calls.append(WholeCall(name, function))
                case ArgumentsDelta(index, text):
                    self.tool_calls[index].arguments += text
        return parts

    def message(self) -> dict[str, Any]:
        """The message of ``/v1/chat/completions`` so far; ``reasoning_content`` where there are thoughts."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        content = None if calls and not self.content else self.content
        found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if calls:
            found["tool_calls"] = calls
        return found

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended, in the API's words."""
        return "tool_calls" if reason == "stop" and self.tool_calls else reason


def delta(part: Part) -> dict[str, Any]:
    """What one part adds to a message of ``/v1/chat/completions``."""
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
