"""Prompts from the command line, from files and from stdin.

Covers the reading of prompts for ``ingot run``.

    read_prompts(["Hello"], file=None)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli.options.flags import option
from ingot.cli.terminal.console import stderr
from ingot.cli.terminal.field_flags import flag_of
from ingot.config.files.json_text import JsonError, parse_json
from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError

_KEYS = ("prompt", "messages", "prompt_token_ids")
WRAPPED = "Wrap each prompt as a user message in the chat format."
PromptFile = Annotated[
    str | None,
    option(
        "Prompts from a file, one per line ('-': stdin). Lines of a .jsonl file are objects with prompt, "
        "messages or prompt_token_ids."
    ),
]
ManyIds = Annotated[
    list[str] | None,
    option(
        "A prompt as token ids separated by spaces; may be repeated.", "--ids", metavar="IDS", shown=False
    ),
]


@dataclass(frozen=True)
class PromptGiven:
    """One prompt: exactly one of the three is set."""

    prompt: str | None = None
    messages: Sequence[Any] | None = None
    prompt_token_ids: Sequence[Any] | None = None

    @property
    def value(self) -> Any:
        """The one that is set, as the library takes it."""
        if self.messages is not None:
            return self.messages
        return self.prompt if self.prompt is not None else list(self.prompt_token_ids or [])

    def as_message(self, images: Sequence[str] = ()) -> PromptGiven:
        """A text as the message of a user, behind pictures; ids and messages as they are."""
        if self.prompt is None:
            return self
        text: Any = self.prompt
        if images:
            shown = [{"type": "image", "image": image} for image in images]
            text = [*shown, {"type": "text", "text": self.prompt}]
        return PromptGiven(messages=[{"role": "user", "content": text}])

    @property
    def title(self) -> str:
        """One short line that tells it from others."""
        text = self.prompt
        if self.messages:
            text = _text_of(self.messages[-1])
        if self.prompt_token_ids is not None:
            text = " ".join(map(str, self.prompt_token_ids))
        line = " ".join((text or "").split())
        return line if len(line) <= 72 else line[:71] + "…"


def read_prompts(
    texts: Sequence[str], file: str | None, ids: Sequence[str] = (), *, flag: str = "a prompt"
) -> list[PromptGiven]:
    """All prompts: texts, token ids, the lines of a file, or the whole of stdin as one.

    A ``.jsonl`` file holds an object a line, with one of the keys prompt, messages, prompt_token_ids; any
    other file, and ``-`` for stdin, holds a prompt a line. Empty lines are skipped. Other keys of an object
    are named on stderr, since they are not read.

    Args:
        flag: how the verb takes texts.

    Raises:
        BadParameter: none were given, an empty one, or several kinds.
        RequestError: a file cannot be read, or one of its lines is no prompt or holds a sampling value, which
            only a flag sets; it names the line.
    """
    if (bool(texts) + bool(ids) + (file is not None)) > 1:
        raise typer.BadParameter(f"give {flag}, --ids or a file, not several")
    if ids:
        return [PromptGiven(prompt_token_ids=ids_of(text)) for text in ids]
    if "" in texts:
        raise typer.BadParameter("the prompt is empty")
    if texts:
        return [PromptGiven(prompt=text) for text in texts]
    if file is None:
        return [PromptGiven(prompt=_stdin_text())]
    lines = _lines(file)
    if file.endswith(".jsonl"):
        unread: dict[str, None] = {}
        found = [_of_object(line, f"{file}, line {number}", unread) for number, line in lines]
        if unread:
            stderr().print(f"note: {file}: ignored keys: {', '.join(unread)}", style="dim", markup=False)
    else:
        found = [PromptGiven(prompt=line) for _, line in lines]
    if not found:
        where = "stdin" if file == "-" else file
        raise RequestError("no prompts", seen=f"{where} is empty", field="file")
    return found


def ids_of(text: str) -> list[int]:
    """Token ids of what ``--ids`` gives.

    Raises:
        RequestError: it holds something else, or nothing.
    """
    try:
        ids = [int(word) for word in text.split()]
    except ValueError:
        ids = []
    if not ids:
        raise RequestError(
            "--ids takes token ids",
            seen=repr(text[:80]),
            allowed="integers separated by spaces",
            field="ids",
        )
    return ids


def _lines(file: str) -> list[tuple[int, str]]:
    """The non-empty lines of a file (``-``: stdin) and their numbers."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise RequestError("the prompts cannot be read", seen=error, field="file") from None
    lines = _decoded(data, file).split("\n")
    return [(i, line.removesuffix("\r")) for i, line in enumerate(lines, start=1) if line.strip()]


def _stdin_text() -> str:
    """The whole of stdin without the line end that echo and editors put last."""
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, --file, or text on stdin")
    text = _decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise typer.BadParameter("stdin is empty: give a prompt, --file, or text on stdin")
    return text


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not UTF-8", seen=error, fix="convert it to UTF-8") from None


def _of_object(line: str, where: str, unread: dict[str, None]) -> PromptGiven:
    """A line of a .jsonl file; its keys that no prompt has go into ``unread``."""
    try:
        value = parse_json(line)
    except JsonError:
        value = None
    keys = [key for key in _KEYS if isinstance(value, dict) and key in value]
    kind = str if keys == ["prompt"] else list
    if len(keys) != 1 or not isinstance(value[keys[0]], kind):
        raise RequestError(
            f"{where} is not a prompt",
            seen=line[:80],
            allowed='{"prompt": "…"}, {"messages": […]} or {"prompt_token_ids": […]}',
            field="file",
        )
    _check_others(where, [key for key in value if key not in keys], unread)
    return PromptGiven(**{keys[0]: value[keys[0]]})


def _check_others(where: str, others: list[str], unread: dict[str, None]) -> None:
    """Refuse a sampling value: whoever wrote it expects it to count."""
    values = [key for key in others if key in SamplingParams.__dataclass_fields__]
    if values:
        flags = ", ".join(flag_of("max_new_tokens" if key == "max_tokens" else key) for key in values)
        raise RequestError(
            f"{where} sets sampling values, which can only be set for all prompts together",
            seen=values,
            field="file",
            fix=f"{flags}, and remove them from the file",
        )
    unread.update(dict.fromkeys(others))


def _text_of(message: Any) -> str:
    """A message's text, of a list of parts those of text."""
    content = message.get("content") if isinstance(message, dict) else ""
    if not isinstance(content, list):
        return str(content)
    return " ".join(str(part.get("text")) for part in content if isinstance(part, dict) and "text" in part)
