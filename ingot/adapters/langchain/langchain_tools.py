"""Tools of a call, and the tool calls in its answer.

Covers what LangChain's ``tools``, ``tool_choice`` and ``parallel_tool_calls`` mean to an engine, and the
shape of tool calls in messages.

    tools, rest = ToolUse.of(kwargs)
    message = tools.message(answer.text)
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool

from ingot.config.grammar_spec import Grammar
from ingot.errors import RequestError
from ingot.text.parsing.tool_calls import ArgumentsDelta, CallStart, ContentDelta, Delta, ToolCallParser

_NAMES = ("tools", "tool_choice", "parallel_tool_calls")
_STRUCTURED = "ls_structured_output_format"  # by with_structured_output, which reads one call
_IGNORED = (_STRUCTURED, "strict")  # a grammar is always strict
_ANY = ("any", "required", True)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
_SCHEMAS = (
    "items", "prefixItems", "additionalProperties", "contains",
    "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
)  # fmt: skip


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
        """What a call's values say of tools, and the other values.

        Raises:
            RequestError: a tool or ``tool_choice`` is malformed, or it names none of them.
        """
        rest = {name: value for name, value in values.items() if name not in (*_NAMES, *_IGNORED)}
        choice = _name_of(values.get("tool_choice"))
        tools = tuple(convert_to_openai_tool(tool) for tool in values.get("tools") or ())
        if not tools or choice == "none":
            return cls(), rest
        parallel = values.get("parallel_tool_calls") is not False and _STRUCTURED not in values
        most_calls = None if parallel else 1
        if choice in (None, False, "auto"):
            return cls(tools, most_calls=most_calls), rest
        name = None if choice in _ANY else choice
        closed = [_closed_tool(tool) for tool in tools]
        return cls(tools, Grammar.tool_calls(closed, name=name, parallel=parallel), most_calls), rest

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
            arguments = _object(written)
            if arguments is None:
                wrong = "the arguments are not a JSON object"
                bad.append(invalid_tool_call(name=start.name, args=written, id=start.id, error=wrong))
            else:
                good.append(tool_call(name=start.name, args=arguments, id=start.id))
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
        """Whether a call has begun."""
        return self._parser is not None and self._parser.num_calls > 0

    def chunk(self, text: str, *, final: bool) -> AIMessageChunk:
        """What more of the text adds; ``final``: nothing follows."""
        if self._parser is None:
            return AIMessageChunk(content=text)
        deltas = self._use.kept(self._parser.feed(text) + (self._parser.flush() if final else []))
        content = "".join(one.text for one in deltas if isinstance(one, ContentDelta))
        return AIMessageChunk(content=content, tool_call_chunks=_chunks(deltas))


def _chunks(deltas: Sequence[Delta]) -> list[ToolCallChunk]:
    found = []
    for one in deltas:
        if isinstance(one, CallStart):
            found.append(tool_call_chunk(name=one.name, args="", id=one.id, index=one.index))
        elif not isinstance(one, ContentDelta):
            found.append(tool_call_chunk(name=None, args=one.text, id=None, index=one.index))
    return found


def _closed_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool with parameters as ``_closed`` makes them; the grammar refuses what is malformed."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or "parameters" not in function:
        return tool
    return {**tool, "function": {**function, "parameters": _closed(function["parameters"])}}


def _closed(schema: Any) -> Any:
    """The schema with objects that have no properties but those they name, where it does not say: a function
    takes no others, and a small model would write them without end.
    """
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {"additionalProperties": False} if "properties" in schema else {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            found[key] = {name: _closed(one) for name, one in value.items()}
        else:
            found[key] = _closed(value) if key in _SCHEMAS else value
    return found


def _name_of(choice: Any) -> Any:
    """A choice in the OpenAI API's form, ``{"type": "function", "function": {"name": …}}``, by its name.

    Raises:
        RequestError: it has another form.
    """
    function = choice.get("function") if isinstance(choice, Mapping) else {"name": choice}
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) and choice not in (None, True, False):
        raise RequestError(
            "tool_choice is malformed",
            seen=choice,
            allowed='auto, none, any, a tool\'s name, or {"type": "function", "function": {"name": ...}}',
            fix="tool_choice",
        )
    return name


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
