"""An answer's text taken apart while it comes: thoughts, content, calls of tools.

Covers the order of the parsers.

    parts = AnswerParts(thoughts="may", calls=True, most_calls=None)
    parts.feed("<think>Hm.</think>Yes", final=True)     # [ReasoningDelta("Hm."), ContentDelta("Yes")]
"""

from __future__ import annotations

from dataclasses import dataclass

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

__all__ = [
    "AnswerParts",
    "ArgumentsDelta",
    "CallStart",
    "ContentDelta",
    "Part",
    "ReasoningDelta",
    "WholeCall",
]


@dataclass(frozen=True)
class ReasoningDelta:
    """Text of the thoughts."""

    text: str


Part = ReasoningDelta | Delta


@dataclass
class WholeCall:
    """A call so far."""

    id: str
    name: str
    arguments: str = ""


class AnswerParts:
    """Of one answer.

    Args:
        thoughts: whether the answer may begin with thoughts, or continues those that the prompt opened.
        calls: the request has tools.
        most_calls: calls beyond these are dropped.

    Attributes:
        reasoning, content, tool_calls: what has come so far.
    """

    def __init__(self, *, thoughts: Thinking, calls: bool, most_calls: int | None) -> None:
        self.reasoning = self.content = ""
        self.tool_calls: list[WholeCall] = []
        self._thinking = None if thoughts == "no" else ThinkingSplitter(opened=thoughts == "must")
        self._calls = ToolCallParser(new_call_id) if calls else None
        self._most_calls = most_calls

    def feed(self, text: str, *, final: bool) -> list[Part]:
        """What ``text`` makes certain; ``final``: nothing comes after it."""
        split = self._split(text, final=final)
        parts: list[Part] = [ReasoningDelta(split.reasoning)] if split.reasoning else []
        if self._calls is None:
            parts += [ContentDelta(split.content)] if split.content else []
        else:
            found = self._calls.feed(split.content) + (self._calls.flush() if final else [])
            parts += [part for part in found if not self._is_beyond(part)]
        for part in parts:
            self._keep(part)
        return parts

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended, in the API's words."""
        return "tool_calls" if reason == "stop" and self.tool_calls else reason

    def _split(self, text: str, *, final: bool) -> ThoughtSplit:
        if self._thinking is None:
            return ThoughtSplit("", text)
        split = self._thinking.feed(text)
        rest = self._thinking.flush() if final else ThoughtSplit()
        return ThoughtSplit(split.reasoning + rest.reasoning, split.content + rest.content)

    def _is_beyond(self, part: Delta) -> bool:
        if isinstance(part, ContentDelta) or self._most_calls is None:
            return False
        return part.index >= self._most_calls

    def _keep(self, part: Part) -> None:
        match part:
            case ReasoningDelta(text):
                self.reasoning += text
            case ContentDelta(text):
                self.content += text
            case CallStart(_, name, function):
                self.tool_calls.append(WholeCall(name, function))
            case ArgumentsDelta(index, text):
                self.tool_calls[index].arguments += text
