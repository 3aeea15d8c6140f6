"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.config.grammar_spec import Grammar, tool_schemas
from ingot.errors import RequestError
from ingot.serve.api_errors import bad_request, refused
from ingot.serve.response_formats import AnswerFormat, check_size, made


@dataclass(frozen=True)
class ToolFields:
    """A request's tools as they concern prompt, grammar and the reading of the answer.

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
        raise refused(error, "tools") from None
    if choice == "none":
        return ToolFields(form=form)
    many = parallel is not False
    if choice in (None, "auto"):
        if form is not None:  # calls, or JSON of the form
            if form.grammar.kind not in ("json_schema", "json_object"):
                text = (
                    f"{form.field} leaves no room for calls: give tool_choice none or required, or no tools"
                )
                raise bad_request(text, form.field)
            check_size(tools, "tools")
            values = {"parallel": many, "otherwise": form.grammar.value()}
            form = form._replace(grammar=made(Grammar.tool_calls, tools, field="tools", **values))
        return ToolFields(tools, form, None if many else 1)
    name = None
    if choice != "required":
        function = choice.get("function") if isinstance(choice, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or choice.get("type", "function") != "function":  # type: ignore[attr-defined]
            forms = '"none", "auto", "required" or {"type": "function", "function": {"name": …}}'
            raise bad_request(f"tool_choice is not one of {forms}", "tool_choice")
        if name not in schemas:
            text = f"tool_choice names {name!r:.80}; the tools are {', '.join(schemas)}"
            raise bad_request(text, "tool_choice")
    check_size(schemas if name is None else schemas[name], "tools")
    many = many and name is None
    grammar = made(Grammar.tool_calls, tools, name=name, parallel=many, field="tools")
    return ToolFields(tools, AnswerFormat(grammar, "tools"), None if many else 1)
