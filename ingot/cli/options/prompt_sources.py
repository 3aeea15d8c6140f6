"""Prompts from the command line, from files and from stdin."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options.flags import option
from ingot.cli.terminal.console import stderr
from ingot.cli.terminal.field_flags import flag_of
from ingot.config.files.json_text import JsonError, parse_json
from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.text.chat.chat_messages import with_system

if TYPE_CHECKING:
    from ingot.llm.prompt_inputs import Messages, PromptLike

_KEYS = ("prompt", "messages", "prompt_token_ids")
WRAPPED = "Wrap each prompt as a user message in the chat format."
PromptFile = Annotated[
    str | None,
    option(
        "Prompts from a file, one per line ('-': stdin). Lines of a .jsonl file are objects with prompt, "
        "messages or prompt_token_ids."
    ),
]
SystemText = Annotated[
    str | None,
    option("The system message before each text or conversation without one.", "--system", metavar="TEXT"),
]
ManyIds = Annotated[
    list[str] | None,
    option(
        "A prompt as token ids separated by spaces; may be repeated.", "--ids", metavar="IDS", shown=False
    ),
]

_MESSAGES = (
    'A conversation: a JSON list of {"role": …, "content": …}, or an object with messages (\'-\': stdin).'
)
MessagesFile = Annotated[str | None, option(_MESSAGES, "--messages", metavar="FILE")]
PromptText = Annotated[str | None, option("A prompt, used as it is.", "--prompt", metavar="TEXT")]
PromptIds = Annotated[
    str | None, option("A prompt as token ids separated by spaces.", "--ids", metavar="IDS")
]


@dataclass(frozen=True)
class PromptGiven:
    """One prompt; exactly one of the three is set."""

    prompt: str | None = None
    messages: Sequence[Any] | None = None
    prompt_token_ids: Sequence[Any] | None = None

    @property
    def value(self) -> Any:
        """The one that is set, as the library takes it."""
        if self.messages is not None:
            return self.messages
        return self.prompt if self.prompt is not None else list(self.prompt_token_ids or [])

    def as_message(self, images: Sequence[str] = (), system: str | None = None) -> PromptGiven:
        """A text as a user's message after pictures; ids and messages as they are. A ``system`` message
        begins each conversation that has none.
        """
        if self.messages is not None:
            return PromptGiven(messages=with_system(self.messages, system))
        if self.prompt is None:
            return self
        text: Any = self.prompt
        if images:
            shown = [{"type": "image", "image": image} for image in images]
            text = [*shown, {"type": "text", "text": self.prompt}]
        return PromptGiven(messages=with_system([{"role": "user", "content": text}], system))

    @property
    def title(self) -> str:
        """One short line that tells it from others."""
        text = self.prompt
        if self.messages:
            last = self.messages[-1]
            content = last.get("content") if isinstance(last, dict) else ""
            if isinstance(content, list):
                texts = (part["text"] for part in content if isinstance(part, dict) and "text" in part)
                content = " ".join(map(str, texts))
            text = str(content)
        if self.prompt_token_ids is not None:
            text = " ".join(map(str, self.prompt_token_ids))
        line = " ".join((text or "").split())
        return line if len(line) <= 72 else line[:71] + "…"


def read_prompts(
    texts: Sequence[str], file: str | None, ids: Sequence[str] = (), *, flag: str = "a prompt"
) -> list[PromptGiven]:
    """All prompts: texts, token ids, the lines of a file, or the whole of stdin as one.

    Each line of a ``.jsonl`` file is an object with prompt, messages or prompt_token_ids; each line of any
    other file, and of ``-`` (stdin), is a prompt. Empty lines are skipped, keys that are not read named on
    stderr.

    Args:
        flag: how the verb takes texts.

    Raises:
        BadParameter: there are none, several kinds, or an empty one.
        RequestError: a file cannot be read, or a line is not a prompt or sets a sampling value.
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
        if sys.stdin is None or sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, --file, or text on stdin")
        text = _decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")
        if not text.strip():
            raise typer.BadParameter("stdin is empty: give a prompt, --file, or text on stdin")
        return [PromptGiven(prompt=text)]
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
    """The token ids in the text of ``--ids``."""
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


def one_prompt(messages: str | None, prompt: str | None, ids: str | None) -> PromptLike | Messages:
    """The prompt given by one of --messages (a file), --prompt and --ids."""
    if sum(value is not None for value in (messages, prompt, ids)) != 1:
        raise typer.BadParameter("give one of --messages, --prompt and --ids")
    if messages is None:
        return prompt if prompt is not None else ids_of(ids or "")
    try:
        data = sys.stdin.buffer.read() if messages == "-" else Path(messages).read_bytes()
        value = parse_json(data.removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise RequestError("the messages cannot be read", seen=error, field="messages") from None
    except JsonError as error:
        raise RequestError(f"{messages} is not JSON", seen=error, field="messages") from None
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise RequestError(
            f"{messages} contains no conversation",
            seen=json.dumps(value)[:80],
            allowed='[{"role": "user", "content": "…"}], or {"messages": […]}',
            field="messages",
        )
    return value


def _lines(file: str) -> list[tuple[int, str]]:
    """The non-empty lines of a file (``-``: stdin) and their numbers."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise RequestError("the prompts cannot be read", seen=error, field="file") from None
    lines = _decoded(data, file).split("\n")
    return [(i, line.removesuffix("\r")) for i, line in enumerate(lines, start=1) if line.strip()]


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not UTF-8", seen=error, fix="convert it to UTF-8") from None


def _of_object(line: str, where: str, unread: dict[str, None]) -> PromptGiven:
    """A line of a .jsonl file; the keys that are not read are added to ``unread``."""
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
    others = [key for key in value if key not in keys]
    values = [key for key in others if key in SamplingParams.__dataclass_fields__]
    if values:  # whoever wrote one expects it to count
        flags = ", ".join(flag_of("max_new_tokens" if key == "max_tokens" else key) for key in values)
        raise RequestError(
            f"{where} sets sampling values, which can only be set for all prompts together",
            seen=values,
            field="file",
            fix=f"{flags}, and remove them from the file",
        )
    unread.update(dict.fromkeys(others))
    return PromptGiven(**{keys[0]: value[keys[0]]})
