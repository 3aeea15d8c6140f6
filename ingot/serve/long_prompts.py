"""Long prompts, tokenized in a process of a lower priority than the engine's.

A thread would share the interpreter with the event loop, which would wait for it
(benchmarks/prompt_process.py has both). Short prompts are not worth the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ingot.engine.manifest import Manifest
from ingot.errors import RequestError
from ingot.llm.prompt_inputs import Chat
from ingot.sandbox.limited_process import LimitedProcess, ProcessEndedError
from ingot.text.prompt_worker import LIMITS, ids_of

LONG = 8192  # characters, with those below
_VALUE = 32  # characters that each value counts as


class LongPromptError(Exception):
    """A prompt has ``count`` ids, more than are given."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} ids")
        self.count = count


class LongPrompts:
    """Ids of prompts, one after another; for threads that may wait. All methods raise ``LongPromptError``,
    and RequestError where a prompt cannot be encoded, or takes more than the limits of the process.

    Args:
        folder: with the files of tokenizer and chat template (``TextFiles``).
        most: ids that are given; a list of millions would hold the interpreter, too.
    """

    def __init__(self, folder: Path, manifest: Manifest, most: int) -> None:
        self._most = most
        generation, chosen = manifest.generation, manifest.chat_template
        self._text = {"folder": str(folder), "generation": generation, "chat_template": chosen}
        self._process = LimitedProcess("ingot.text.prompt_worker", LIMITS)

    def chat_ids(self, chat: Chat, inputs: Sequence[tuple[int, int]] = ()) -> tuple[list[int], list[int]]:
        """Ids of a conversation, and how many are before each of the ``inputs``: message and part."""
        messages = chat.messages
        return self._ids({"messages": messages, "variables": chat.variables, "inputs": inputs})

    def prompt_ids(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._ids({"prompt": prompt, "add_special_tokens": add_special_tokens})[0]

    def check(self, count: int) -> None:
        """Raises LongPromptError for more ids than are given."""
        if count > self._most:
            raise LongPromptError(count)

    def close(self) -> None:
        """End the process; callers that wait for it get an error."""
        self._process.end()

    def _ids(self, question: dict[str, Any]) -> tuple[list[int], list[int]]:
        try:
            asked = {"text": self._text, "most": self._most, **question}
            found = self._process.ask(msgspec.json.encode(asked))
        except ProcessEndedError as error:
            raise RequestError(f"the prompt {error}", fix="a shorter prompt") from None
        if "error" in found:
            raise RequestError(found["error"].pop("what"), **found["error"])
        if "ids" not in found:
            raise LongPromptError(found["count"])
        return ids_of(found["ids"]), found["places"]


def is_long(value: Any) -> bool:
    """Whether a JSON value has enough text or values to be worth a process."""
    left, todo = LONG, [value]
    while todo and left > 0:
        one = todo.pop()
        left -= _VALUE
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return left <= 0
