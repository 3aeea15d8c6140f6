"""Grammars that an answer must follow, as plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from ingot.config.files.json_text import parse_json
from ingot.config.json_config import JsonConfig
from ingot.errors import RequestError

Kind = Literal["json_schema", "json_object", "regex", "choice", "tool_calls"]
Thinking = Literal["no", "may", "must"]
KINDS = ("json_schema", "json_object", "regex", "choice", "tool_calls")
THINKING = ("no", "may", "must")
MAX_CHARS = 256 << 10
MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Grammar(JsonConfig):
    """A grammar that the whole text of an answer follows; made by one of the class methods.

    Attributes:
        kind: what ``text`` is: ``json_schema``, ``regex`` (Rust's syntax, without look-around), ``choice`` (a
            JSON list of strings) or ``tool_calls``; ``json_object`` has none.
        text: at most ``MAX_CHARS`` characters.
        thinking: whether the answer ``may`` begin with a ``<think>`` block, which the grammar does not cover,
            or ``must`` end one that the prompt has opened.
        before: text that precedes the answer and is not shown: the space that SentencePiece puts before the
            first word. ``LLM`` sets it.

    Raises:
        RequestError: the text does not fit its kind, is too long or nested too deeply.
    """

    kind: Kind
    text: str = ""
    thinking: Thinking = "no"
    before: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("thinking", THINKING)):
            if getattr(self, name) not in allowed:
                raise _refused(f"unknown {name} of a grammar", getattr(self, name), allowed)
        if not isinstance(self.text, str) or not isinstance(self.before, str):
            raise _refused("the text of a grammar must be a string", type(self.text).__name__)
        if len(self.text) > MAX_CHARS:
            raise _refused("the grammar is too long", f"{len(self.text)} characters", f"<= {MAX_CHARS}")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise _refused("the grammar holds half of a UTF-16 pair", f"{self.text[error.start]!a}") from None
        if self.kind in ("regex", "json_object"):
            return
        try:
            value = parse_json(self.text)
        except ValueError as error:
            raise _refused(f"the text of a {self.kind} grammar is not JSON", error) from None
        if self.kind == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
                raise _refused("a choice must be a non-empty list of strings", self.text[:80])
        elif not isinstance(value, dict):
            raise _refused("a JSON schema must be an object", type(value).__name__)
        elif self.kind == "tool_calls":
            tools = value.get("tools")
            if not isinstance(tools, dict) or not tools or not isinstance(value.get("parallel"), bool):
                raise _refused("tool calls need tools and parallel", self.text[:80])
            if not isinstance(value.get("otherwise", {}), dict):
                raise _refused("otherwise must be a JSON schema", self.text[:80])
            _check_tools(tools)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Self:
        """JSON that is valid under a JSON schema, given as an object or as text."""
        return cls("json_schema", schema if isinstance(schema, str) else _json(schema))

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that the whole pattern matches."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """One of several texts."""
        return cls("choice", _json([texts] if isinstance(texts, str) else list(texts)))

    @classmethod
    def tool_calls(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        name: str | None = None,
        parallel: bool = True,
        otherwise: Mapping[str, Any] | None = None,
    ) -> Self:
        """At least one call of a tool, as Hermes and Qwen write it, with arguments by the tool's schema.

        Args:
            tools: as in the OpenAI API: ``{"type": "function", "function": {"name": …, "parameters": …}}``.
            name: only this tool may be called.
            parallel: several calls may follow each other.
            otherwise: a JSON schema; the answer may be JSON under it instead of calls.

        Raises:
            RequestError: a tool has no name or one that is not allowed, or ``name`` is unknown.
        """
        schemas = tool_schemas(tools)
        if name is not None and name not in schemas:
            raise RequestError("tool_choice names no tool", seen=name, allowed=list(schemas), field="tools")
        chosen = schemas if name is None else {name: schemas[name]}
        value: dict[str, Any] = {"tools": chosen, "parallel": parallel}
        return cls("tool_calls", _json(value if otherwise is None else value | {"otherwise": otherwise}))

    def value(self) -> Any:
        """The value of ``text``: the schema, the list of texts, the tools, or the pattern of a regex."""
        if self.kind == "json_object":
            return {"type": "object"}
        return self.text if self.kind == "regex" else parse_json(self.text)

    def schemas(self) -> dict[str, Any]:
        """Every JSON schema in it: the answer's under "", those of tools under their names."""
        if self.kind == "tool_calls":
            value = self.value()
            return {**value["tools"], **({"": value["otherwise"]} if "otherwise" in value else {})}
        return {"": self.value()} if self.kind in ("json_schema", "json_object") else {}


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Name → JSON schema of the arguments, of tools in the OpenAI API's form. Raises ``RequestError`` if it
    is not a list of such tools, or a name is not allowed or not unique.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence) or not tools:
        raise RequestError("tools must be a non-empty list of objects", seen=repr(tools)[:80], field="tools")
    schemas: dict[Any, Any] = {}
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(tool, Mapping) and tool.get("type") == "custom":
            fix = "describe it as a function with one string parameter"
            raise RequestError("custom tools are not supported", seen=f"tools[{place}]", fix=fix)
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            form = '{"type": "function", "function": {"name": …, "parameters": …}}'
            seen = repr(tool)[:80]
            raise RequestError(f"tools[{place}] is not a function", seen=seen, allowed=form, field="tools")
        name = function.get("name")
        if not isinstance(name, str):
            raise RequestError(f"tools[{place}] has no name", seen=repr(name)[:80], field="tools")
        if name in schemas:
            raise RequestError("two tools have one name", seen=name, field="tools")
        parameters = function.get("parameters")
        schemas[name] = {"type": "object"} if parameters is None else parameters
    _check_tools(schemas)
    return schemas


def _check_tools(schemas: Mapping[Any, Any]) -> None:
    if len(schemas) > MAX_TOOLS:
        raise RequestError("too many tools", seen=len(schemas), allowed=f"<= {MAX_TOOLS}", field="tools")
    for name, schema in schemas.items():
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            allowed = "1 to 64 letters, digits, _, - and ."
            raise RequestError("a tool's name is not allowed", seen=name, allowed=allowed, field="tools")
        if not isinstance(schema, Mapping):
            seen = type(schema).__name__
            raise RequestError(f"the parameters of {name} must be a JSON schema", seen=seen, field="tools")


def _json(value: Any) -> str:
    """JSON text; equal values, order included, have equal texts."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused("a grammar is made of JSON values", error) from None


def _refused(what: str, seen: object, allowed: object = None) -> RequestError:
    return RequestError(what, seen=seen, allowed=allowed, field="grammar")
