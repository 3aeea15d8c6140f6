"""Tools of a LangChain call, and the tool calls in its answer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool

from ingot.config.grammar_spec import Grammar
from ingot.errors import RequestError
from ingot.text.grammar.closed_schemas import closed_grammar
from ingot.text.parsing.tool_calls import ArgumentsDelta, CallStart, ContentDelta, Delta, ToolCallParser

_NAMES = ("tools", "tool_choice", "parallel_tool_calls")
_STRUCTURED = "ls_structured_output_format"  # by with_structured_output, which reads one call
_IGNORED = (_STRUCTURED, "strict")  # a grammar is always strict
_ANY = ("any", "required", True)


@dataclass(frozen=True)
class ToolUse:
    """Tools that an answer may call.

    Attributes:
        tools: as in the OpenAI API; empty: none, and an answer is text.
        grammar: what the answer must be, where a call is demanded.
        most_calls: calls beyond these are dropped; None: none are.
    """

    tools: tuple[dict[str, Any], ...] = ()
    grammar: Grammar | None = None
    most_calls: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """The tools of a call's values, and the other values; raises RequestError where a tool or
        ``tool_choice`` is malformed, or the choice names none of them.
        """
        rest = {name: value for name, value in values.items() if name not in (*_NAMES, *_IGNORED)}
        choice = values.get("tool_choice")
        function = choice.get("function") if isinstance(choice, Mapping) else {"name": choice}
        choice = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(choice, str) and values.get("tool_choice") not in (None, True, False):
            raise RequestError(
                "tool_choice is malformed",
                seen=values["tool_choice"],
                allowed='auto, none, any, a tool\'s name, or {"type": "function", "function": {"name": ...}}',
                fix="tool_choice",
            )
        tools = tuple(convert_to_openai_tool(tool) for tool in values.get("tools") or ())
        if not tools or choice == "none":
            return cls(), rest
        parallel = values.get("parallel_tool_calls") is not False and _STRUCTURED not in values
        most_calls = None if parallel else 1
        if choice in (None, False, "auto"):
            return cls(tools, most_calls=most_calls), rest
        name = None if choice in _ANY else choice
        # A function takes no other arguments, and a small model would write them without end.
        grammar = closed_grammar(Grammar.tool_calls(tools, name=name, parallel=parallel))
        return cls(tools, grammar, most_calls), rest

    def message(self, text: str) -> AIMessage:
        """A whole answer; a call whose arguments are not a JSON object is invalid."""
        if not self.tools:
            return AIMessage(content=text)
        parser = ToolCallParser()
        deltas = self.kept([*parser.feed(text), *parser.flush()])
        content = "".join(one.text for one in deltas if isinstance(one, ContentDelta))
        pieces: dict[int, list[str]] = defaultdict(list)
        for one in deltas:
            if isinstance(one, ArgumentsDelta):
                pieces[one.index].append(one.text)
        good, bad = [], []
        for start in (one for one in deltas if isinstance(one, CallStart)):
            written = "".join(pieces[start.index])
            try:
                arguments = json.loads(written)
            except (ValueError, RecursionError):
                arguments = None
            if isinstance(arguments, dict):
                good.append(tool_call(name=start.name, args=arguments, id=start.id))
            else:
                wrong = "the arguments are not a JSON object"
                bad.append(invalid_tool_call(name=start.name, args=written, id=start.id, error=wrong))
        return AIMessage(content=content, tool_calls=good, invalid_tool_calls=bad)

    def kept(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Without the calls beyond ``most_calls``."""
        most = self.most_calls
        return [one for one in deltas if isinstance(one, ContentDelta) or most is None or one.index < most]


class ToolStream:
    """Pieces of one answer as message chunks."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser = ToolCallParser() if use.tools else None

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    def chunk(self, text: str, *, final: bool) -> AIMessageChunk:
        """The chunk of more text; ``final``: nothing follows."""
        if self._parser is None:
            return AIMessageChunk(content=text)
        deltas = self._use.kept(self._parser.feed(text) + (self._parser.flush() if final else []))
        content = "".join(one.text for one in deltas if isinstance(one, ContentDelta))
        chunks = []
        for one in deltas:
            if isinstance(one, CallStart):
                chunks.append(tool_call_chunk(name=one.name, args="", id=one.id, index=one.index))
            elif not isinstance(one, ContentDelta):
                chunks.append(tool_call_chunk(name=None, args=one.text, id=None, index=one.index))
        return AIMessageChunk(content=content, tool_call_chunks=chunks)
