"""Tools of a LangChain call, and the tool calls in its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool

from ingot.config.grammar_spec import Grammar
from ingot.errors import RequestError
from ingot.serve.api.answer_parts import AnswerParts, Part
from ingot.text.grammar.closed_schemas import closed_grammar
from ingot.text.parsing.tool_calls import ArgumentsDelta, CallStart

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

    def parts(self) -> AnswerParts:
        """A parser of one answer's text."""
        return AnswerParts(thoughts="no", calls=bool(self.tools), most_calls=self.most_calls)

    def message(self, text: str) -> AIMessage:
        """A whole answer; a call whose arguments are not a JSON object is invalid."""
        parts = self.parts()
        parts.feed(text, final=True)
        good, bad = [], []
        for call in parts.tool_calls:
            try:
                arguments = json.loads(call.arguments)
            except (ValueError, RecursionError):
                arguments = None
            if isinstance(arguments, dict):
                good.append(tool_call(name=call.name, args=arguments, id=call.id))
            else:
                wrong = "the arguments are not a JSON object"
                bad.append(invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=wrong))
        return AIMessage(content=parts.content, tool_calls=good, invalid_tool_calls=bad)


def as_chunk(parts: Sequence[Part]) -> AIMessageChunk:
    """What an answer's new parts add to its message."""
    content, chunks = "", []
    for one in parts:
        if isinstance(one, CallStart):
            chunks.append(tool_call_chunk(name=one.name, args="", id=one.id, index=one.index))
        elif isinstance(one, ArgumentsDelta):
            chunks.append(tool_call_chunk(name=None, args=one.text, id=None, index=one.index))
        else:
            content += one.text
    return AIMessageChunk(content=content, tool_call_chunks=chunks)
