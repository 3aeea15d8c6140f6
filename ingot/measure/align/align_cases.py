"""What goes into a comparison: prompts as text, as ids, and as the original's own tokenizer makes them.

Owns the first two stages, the rendered prompt and the token ids. Knows no tensor.

    case = make_case(text_parts, "Hello", original)
    case.checks     # [TextCheck("token ids", ...)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.engine.engine_text import TextParts, read_engine_text, read_text_parts
from ingot.engine.manifest import Manifest, is_engine
from ingot.errors import RequestError, TokenizerError
from ingot.measure.side.huggingface import ClassTokenizer
from ingot.proof.golden_replay import first_difference

PromptGiven = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TextCheck:
    """The rendered prompt, or the token ids, of both sides; ``against``: whose the expected ones are."""

    stage: str
    expected: str | list[int]
    got: str | list[int]
    against: str

    @property
    def is_bad(self) -> bool:
        return self.expected != self.got

    @property
    def first(self) -> int | None:
        return first_difference(self.expected, self.got) if self.is_bad else None


@dataclass(frozen=True)
class AlignCase:
    """One prompt: a short title, the ids that both sides are given, and the checks of text and ids."""

    title: str
    ids: list[int]
    checks: tuple[TextCheck, ...] = ()


class FolderText:
    """The original's own files read by our tokenizers, where no other reader is there."""

    name = "the checkpoint's files"

    def __init__(self, folder: Path) -> None:
        text = _text_parts(folder)
        if text.tokenizer is None:
            raise TokenizerError("the checkpoint has no tokenizer", seen=folder)
        self._tokenizer, self._chat = text.tokenizer, text.chat

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]] | None:
        if self._chat is None:
            return None
        text = self._chat.prompt_text(messages, tokenizer=self._tokenizer)
        return text, self._chat.prompt_ids(messages, self._tokenizer)


def _text_parts(folder: Path) -> TextParts:
    """Of an engine or a checkpoint."""
    if is_engine(folder):
        return read_engine_text(folder, Manifest.read(folder))
    with open_checkpoint(folder) as source:
        return read_text_parts(source)


OriginalText = ClassTokenizer | FolderText


def open_original_text(folder: Path) -> tuple[OriginalText, str] | None:
    """The tokenizer of a checkpoint's files and whose it is: Hugging Face's class, else our reading of the
    files; None where there are none.
    """
    found = None if is_engine(folder) else ClassTokenizer.of(folder)
    if found is not None:
        return found, "Hugging Face's tokenizer"
    try:
        return FolderText(folder), FolderText.name
    except TokenizerError:
        return None


def make_case(text: TextParts, prompt: PromptGiven, original: tuple[OriginalText, str] | None) -> AlignCase:
    """A prompt's ids and checks. Both sides run on the original's ids, so that a wrong token does not hide
    the stages behind it.

    Raises:
        RequestError: text, but the engine has no tokenizer; messages, but no chat format.
    """
    if not isinstance(prompt, str) and all(isinstance(i, int) for i in prompt):
        return AlignCase(" ".join(map(str, prompt))[:60], [int(i) for i in prompt])  # type: ignore[arg-type]
    if text.tokenizer is None:
        raise RequestError(
            "the engine has no tokenizer", seen=repr(prompt)[:60], allowed="token ids", field="ids"
        )
    if isinstance(prompt, str):
        ids = text.tokenizer.encode(prompt)
        if original is None:
            return AlignCase(_title(prompt), ids)
        theirs = original[0].ids(prompt)
        return AlignCase(_title(prompt), theirs, (TextCheck("token ids", theirs, ids, original[1]),))
    return _chat_case(text, prompt, original)  # type: ignore[arg-type]


def _chat_case(
    text: TextParts, messages: Sequence[Mapping[str, Any]], original: tuple[OriginalText, str] | None
) -> AlignCase:
    if text.chat is None or text.tokenizer is None:
        raise RequestError(
            "the engine has no chat template",
            field="chat",
            fix="leave out `chat`, or rebuild with `chat_template=chatml`",
        )
    ids = text.chat.prompt_ids(messages, text.tokenizer)
    title = _title(str(messages[-1].get("content")))
    theirs = None if original is None else original[0].chat(messages)
    if theirs is None or original is None:
        return AlignCase(title, ids)
    rendered = text.chat.prompt_text(messages, tokenizer=text.tokenizer)
    checks = (
        TextCheck("rendered prompt", theirs[0], rendered, original[1]),
        TextCheck("token ids", theirs[1], ids, original[1]),
    )
    return AlignCase(title, theirs[1], checks)


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
