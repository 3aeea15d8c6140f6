"""Chat templates of Hugging Face checkpoints.

Owns rendering a Jinja template to token ids so that only the template makes special tokens. Knows no files
but the template's name for messages to people.

    JinjaFormat("{{ messages[0].content }}", "chat_template.jinja", {}).prompt_ids(messages, tokenizer)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2

from ingot.errors import RequestError, TokenizerError
from ingot.processors.chat_format import ChatFormat
from ingot.processors.chat_messages import TEMPLATE_ROLES, check_messages
from ingot.processors.template_sandbox import TemplateRefusal, TemplateSandbox
from ingot.processors.tokenizer_base import Tokenizer
from ingot.processors.tokenizer_folder import TURN_ENDS

_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0x100000, 0x10FFFE))
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class JinjaFormat(ChatFormat):
    """A chat template.

    Args:
        source: the Jinja text.
        origin: where it is from, for errors.
        named_tokens: ``bos_token`` and the like, which templates print.

    Raises:
        TokenizerError: the template does not parse.
    """

    def __init__(self, source: str, origin: str, named_tokens: Mapping[str, str]) -> None:
        self.name = f"the chat template in {origin}"
        self._source = source
        self._named_tokens = dict(named_tokens)
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.compile_template(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise TokenizerError(
                f"{self.name} has an error" + (f" in line {line}" if line else ""), seen=error
            ) from error

    def prompt_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenizer: Tokenizer | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """See ``ChatFormat.prompt_text``."""
        return self._render(check_messages(messages, TEMPLATE_ROLES), variables or {}, add_generation_prompt)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """See ``ChatFormat.prompt_ids``.

        The first character of every special token that a user typed is replaced by a private-use character
        that occurs nowhere else, the template is rendered, the prompt is cut at the special tokens that are
        left, and the character is put back. Lengths, white space and splitting inside templates stay as they
        are.
        """
        checked = check_messages(messages, TEMPLATE_ROLES)
        values = variables or {}
        disguise = _Disguise(tokenizer.special_tokens, [self._source, *_strings([checked, dict(values)])])
        text = self._render(disguise.hide(checked), disguise.hide(dict(values)), add_generation_prompt)
        parts = tokenizer.split_special(text)
        return tokenizer.encode_parts([disguise.show(p) if isinstance(p, str) else p for p in parts])

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokenizer's end of text, and the ends of a turn that the template writes."""
        ends = [tokenizer.special_tokens.get(text) for text in TURN_ENDS if text in self._source]
        return tuple(dict.fromkeys(i for i in (tokenizer.eos_id, *ends) if i is not None))

    def _render(self, messages: Any, variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
        values = {"tools": None, "documents": None, **self._named_tokens, **variables}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._sandbox.render(self._template, **values)
        except TemplateRefusal as error:
            raise RequestError(f"{self.name} refuses these messages", seen=error, fix="messages") from error
        except _RENDER_ERRORS as error:
            raise RequestError(f"{self.name} fails on these messages", seen=error, fix="messages") from error


class _Disguise:
    """Hides special tokens inside values behind private-use characters, and shows them again.

    Args:
        special: texts of the special tokens.
        taken: texts whose characters must not be used.
    """

    def __init__(self, special: Iterable[str], taken: Iterable[str]) -> None:
        texts = sorted(special, key=len, reverse=True)
        used = set().union(*map(set, taken))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        self._masks = {first: next(free) for first in sorted({text[0] for text in texts})}
        self._faces = str.maketrans({mask: first for first, mask in self._masks.items()})
        starts = "|".join(map(re.escape, texts)) if texts else "(?!)"
        self._starts = re.compile(f"(?={starts}).", re.DOTALL)

    def hide(self, value: Any) -> Any:
        """``value`` with every special token in its strings broken; rebuilt from plain dicts and lists."""
        if isinstance(value, str):
            return self._starts.sub(lambda match: self._masks[match[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def show(self, text: str) -> str:
        """``text`` with the characters put back."""
        return text.translate(self._faces)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
