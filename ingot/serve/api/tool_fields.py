"""The tools of a request.

Covers what ``tools``, ``tool_choice`` and ``parallel_tool_calls`` mean for the prompt, for the grammar and
for the reading of the answer.

    use = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, read_format(body))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.config.grammar_spec import Grammar, tool_schemas
from ingot.errors import RequestError
from ingot.serve.api_errors import bad_request
from ingot.serve.response_formats import AnswerFormat, check_size, field_error, made


@dataclass(frozen=True)
class ToolFields:
    """What comes of a request's tools.

    Attributes:
        offered: tools that the model may call; if empty, no text of the answer is a call.
        form: what the answer must be.
        most_calls: None for any number.
    """

    offered: Sequence[Mapping[str, Any]] = ()
    form: AnswerFormat | None = None
    most_calls: int | None = None


def read_tools(
    tools: list[dict[str, Any]] | None, choice: object, parallel: bool | None, form: AnswerFormat | None
) -> ToolFields:
    """The tools, by ``choice``: None, ``none``, ``auto``, ``required``, or the function that must be called.

    Args:
        form: of an answer that is no call.

    Raises:
        ApiError: a tool is malformed, they are too large for a grammar, the choice is none of these, or the
            form leaves no room for a call.
    """
    if not tools:
        if choice in (None, "none", "auto"):
            return ToolFields(form=form)
        raise bad_request("tool_choice needs tools", "tool_choice")
    try:
        schemas = tool_schemas(tools)
    except RequestError as error:
        raise field_error(error, "tools") from None
    if choice == "none":
        return ToolFields(form=form)
    many = parallel is not False
    if choice in (None, "auto"):
        held = None if form is None else _calls_or(form, tools, many)
        return ToolFields(tools, held, None if many else 1)
    name = None if choice == "required" else _named(choice, list(schemas))
    check_size(schemas if name is None else schemas[name], "tools")
    many = many and name is None
    grammar = made(Grammar.tool_calls, tools, name=name, parallel=many, field="tools")
    return ToolFields(tools, AnswerFormat(grammar, "tools"), None if many else 1)


def _calls_or(form: AnswerFormat, tools: list[dict[str, Any]], parallel: bool) -> AnswerFormat:
    """Calls, or JSON of a form."""
    if form.grammar.kind not in ("json_schema", "json_object"):
        text = f"{form.field} leaves no room for calls: give tool_choice none or required, or no tools"
        raise bad_request(text, form.field)
    check_size(tools, "tools")
    schema = form.grammar.value()
    make = Grammar.tool_calls
    return AnswerFormat(made(make, tools, parallel=parallel, otherwise=schema, field="tools"), form.field)


def _named(choice: object, names: list[str]) -> str:
    """The tool that must be called."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":  # type: ignore[attr-defined]
        forms = '"none", "auto", "required" or {"type": "function", "function": {"name": …}}'
        raise bad_request(f"tool_choice is not one of {forms}", "tool_choice")
    if name not in names:
        raise bad_request(f"tool_choice names {name!r:.80}; the tools are {', '.join(names)}", "tool_choice")
    return name
