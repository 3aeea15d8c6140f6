"""Chat templates of Hugging Face checkpoints, rendered so that only the template makes special tokens."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ingot.config.files.json_text import parse_json
from ingot.errors import RequestError, TokenizerError
from ingot.sandbox.limited_process import LimitedProcess, ProcessEndedError, ProcessLimits
from ingot.text.chat.chat_format import ChatFormat, ConversationPart
from ingot.text.chat.chat_messages import (
    TEMPLATE_ROLES,
    Message,
    check_messages,
    with_arguments,
    without_developer,
)
from ingot.text.tokenizer.tokenizer_base import Tokenizer
from ingot.text.tokenizer.tokenizer_folder import TURN_ENDS

THOUGHTS_END = "</think>"
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0x100000, 0x10FFFE))
_SANDBOX = "ingot.text.chat.template_sandbox"
_OWN = {"messages", "add_generation_prompt"}
_MARK = "(what the developer says)"
_OTHER = "build with another template: `chat_template=chatml`"
_UNREAD = "leave them out, or use a model whose template takes them (tools, enable_thinking)"


class JinjaFormat(ChatFormat):
    """A Jinja chat template.

    Args:
        origin: where ``source`` is from, for errors.
        named_tokens: ``bos_token`` and the like, which templates print.
        limits: of the process in which the template runs.

    Raises:
        TokenizerError: the template does not parse within its limits.
    """

    def __init__(
        self,
        source: str,
        origin: str,
        named_tokens: Mapping[str, str],
        limits: ProcessLimits = ProcessLimits(),  # noqa: B008
    ) -> None:
        self.name = f"the chat template in {origin}"
        self._source = source
        self._named_tokens = dict(named_tokens)
        self._sandbox = LimitedProcess(_SANDBOX, limits)
        try:
            found = self._sandbox.ask({"source": source, "variables": None})
        except ProcessEndedError as error:
            raise TokenizerError(f"{self.name} {error}", fix=_OTHER) from None
        if "fault" in found:
            where = f" in line {found['line']}" if found["line"] else ""
            raise TokenizerError(f"{self.name} has an error{where}", seen=found["fault"], fix=_OTHER)
        self.variables = frozenset(found["names"]) - _OWN
        self.thinks = THOUGHTS_END in source
        self._names_developer = "developer" in found["texts"]

    def _text(self, asked: ConversationPart, tokenizer: Tokenizer | None) -> str:
        return self._render(*self._checked(asked), asked.generate)

    def _ids(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[int]:
        """Only the template's own special tokens become ids.

        While it is rendered, a private-use character that occurs nowhere else replaces the first character of
        every special token in the messages. Lengths, white space and splitting in templates stay the same.
        """
        checked, values = self._checked(asked)
        taken = self._source + json.dumps([checked, values], ensure_ascii=False)
        disguise = _Disguise(tokenizer.special_tokens, taken)
        text = self._render(disguise.hide(checked), disguise.hide(values), asked.generate)
        parts = tokenizer.split_special(text)
        return tokenizer.encode_parts([disguise.show(p) if isinstance(p, str) else p for p in parts])

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokenizer's end of text, and the ends of turns that the template writes."""
        ends = [tokenizer.special_tokens.get(text) for text in TURN_ENDS if text in self._source]
        return tuple(dict.fromkeys(i for i in (tokenizer.eos_id, *ends) if i is not None))

    def _checked(self, asked: ConversationPart) -> tuple[list[Message], dict[str, Any]]:
        """Messages and variables as JSON values, which templates take."""
        unknown = sorted(str(name) for name in asked.variables if name not in self.variables)
        if unknown:
            allowed = sorted(self.variables) or "none"
            raise RequestError(
                f"{self.name} does not read these variables", seen=unknown, allowed=allowed, fix=_UNREAD
            )
        messages = check_messages(asked.messages, TEMPLATE_ROLES)
        if any(one["role"] == "developer" for one in messages) and not self._has_developer:
            messages = without_developer(messages)
        given = with_arguments(messages), dict(asked.variables)
        try:
            checked, values = parse_json(json.dumps(given, default=_as_object))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"{self.name} takes messages and variables of JSON types", seen=error, field="messages"
            ) from None
        return checked, values

    @functools.cached_property
    def _has_developer(self) -> bool:
        """Whether the template has a developer role: it names the role and writes its message. (A template
        that prints any role's name does not name this one; others drop or refuse the message.)
        """
        messages = [{"role": "developer", "content": _MARK}, {"role": "user", "content": "?"}]
        try:
            return self._names_developer and _MARK in self._render(messages, {}, True)
        except RequestError:
            return False

    def _render(self, messages: Any, variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
        values = {"tools": None, "documents": None, **self._named_tokens, **variables}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            found = self._sandbox.ask({"source": self._source, "variables": values})
        except ProcessEndedError as error:
            raise RequestError(f"{self.name} {error}", fix=_OTHER) from None
        if "fault" in found:
            verb = "refuses" if found["kind"] == "refusal" else "fails on"
            raise RequestError(f"{self.name} {verb} these messages", seen=found["fault"], field="messages")
        return str(found["text"])


class ToolTemplates(ChatFormat):
    """Two templates of one checkpoint, as in transformers: ``tools`` for requests with tools, and ``plain``
    for all others, which are refused where it is None.
    """

    def __init__(self, origin: str, plain: JinjaFormat | None, tools: JinjaFormat) -> None:
        self._plain, self._tools = plain, tools
        self._both = [one for one in (plain, tools) if one is not None]
        self.name = f"the chat template in {origin}"
        self.variables = frozenset().union(*(one.variables for one in self._both))
        self.thinks = any(one.thinks for one in self._both)

    def _text(self, asked: ConversationPart, tokenizer: Tokenizer | None) -> str:
        return self._of(asked)._text(asked, tokenizer)

    def _ids(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[int]:
        return self._of(asked)._ids(asked, tokenizer)

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        return tuple(dict.fromkeys(i for one in self._both for i in one.stop_ids(tokenizer)))

    def _of(self, asked: ConversationPart) -> JinjaFormat:
        if asked.variables.get("tools") is not None:
            return self._tools
        if self._plain is None:
            raise RequestError(
                f"{self.name} is for requests with tools (tool_use), and there is none named default",
                seen="a request without tools",
                fix=f"give tools, or {_OTHER}",
            )
        return self._plain


class _Disguise:
    """Hides special tokens inside values behind private-use characters that ``taken`` does not have."""

    def __init__(self, special: Iterable[str], taken: str) -> None:
        texts = sorted(special, key=len, reverse=True)
        used = set(taken)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        self._masks = {first: next(free) for first in sorted({text[0] for text in texts})}
        self._faces = str.maketrans({mask: first for first, mask in self._masks.items()})
        starts = "|".join(map(re.escape, texts)) if texts else "(?!)"
        self._starts = re.compile(f"(?={starts}).", re.DOTALL)

    def hide(self, value: Any) -> Any:
        """A JSON value with every special token in its strings broken."""
        if isinstance(value, str):
            return self._starts.sub(lambda match: self._masks[match[0]], value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def show(self, text: str) -> str:
        """``text`` with the characters put back."""
        return text.translate(self._faces)


def _as_object(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")
