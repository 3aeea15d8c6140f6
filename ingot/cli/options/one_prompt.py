"""One prompt from the command line: text, token ids, or a conversation in a file.

Covers ``--prompt``, ``--ids`` and ``--messages``, of which a verb takes one.

    one_prompt(messages=None, prompt="Hello", ids=None)
"""

from __future__ import annotations

import codecs
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.options.flags import option
from ingot.cli.options.prompt_sources import ids_of
from ingot.config.files.json_text import JsonError, parse_json
from ingot.errors import RequestError

if TYPE_CHECKING:
    from ingot.llm.prompt_inputs import Messages, PromptLike

_MESSAGES = (
    'A conversation: a JSON list of {"role": …, "content": …}, or an object with messages (\'-\': stdin).'
)
MessagesFile = Annotated[str | None, option(_MESSAGES, "--messages", metavar="FILE")]
PromptText = Annotated[str | None, option("A prompt, used as it is.", "--prompt", metavar="TEXT")]
PromptIds = Annotated[
    str | None, option("A prompt as token ids separated by spaces.", "--ids", metavar="IDS")
]


def one_prompt(messages: str | None, prompt: str | None, ids: str | None) -> PromptLike | Messages:
    """The prompt that was given.

    Raises:
        RequestError: the file cannot be read or holds no conversation, or an id is no integer.
    """
    if sum(value is not None for value in (messages, prompt, ids)) != 1:
        raise typer.BadParameter("give one of --messages, --prompt and --ids")
    if messages is not None:
        return _conversation(messages)
    return prompt if prompt is not None else ids_of(ids or "")


def _conversation(file: str) -> Messages:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        value = parse_json(data.removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise RequestError("the messages cannot be read", seen=error, field="messages") from None
    except JsonError as error:
        raise RequestError(f"{file} is not JSON", seen=error, field="messages") from None
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise RequestError(
            f"{file} contains no conversation",
            seen=json.dumps(value)[:80],
            allowed='[{"role": "user", "content": "…"}], or {"messages": […]}',
            field="messages",
        )
    return value
