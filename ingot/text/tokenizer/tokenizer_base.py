"""The interface of tokenizers, with splitting at special tokens and decoding."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ingot.errors import IngotError, RequestError
from ingot.text.tokenizer.token_text import Utf8Stream
from ingot.text.tokenizer.tokenizer_folder import AddedToken

CANNOT_ENCODE = "the tokenizer cannot encode this text"
_OTHER = "change the text, or use another tokenizer"


class Tokenizer(ABC):
    """Text to token ids and back. Safe to share between threads.

    Attributes:
        bos_id, eos_id: begin and end of text; None: the tokenizer has none.
        vocab_size: one more than the largest id; a model's own vocabulary may be padded beyond it.
        special_tokens: text → id of the tokens that frame a prompt.
        files: every file to copy so that ``load_tokenizer`` and the chat template work on the copy.
        prefix_ids, suffix_ids: what ``encode`` puts around a text, as Hugging Face does for this tokenizer.
        joins_bytes: whether the text of ids is their joined bytes, so that it can be streamed exactly.
    """

    def __init__(
        self,
        added: Iterable[AddedToken],
        *,
        vocab_size: int,
        bos_id: int | None,
        eos_id: int | None,
        files: tuple[Path, ...],
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
    ) -> None:
        self._added = tuple(added)
        self._added_texts = {token.id: token.text for token in self._added}
        self._special_ids = frozenset(token.id for token in self._added if token.special)
        self._specials = {token.text: token for token in self._added if token.special}
        self._special_pattern = token_pattern(self._specials)
        self._bytes: dict[int, bytes] = {}
        self.special_tokens = {text: token.id for text, token in self._specials.items()}
        self.vocab_size = max([vocab_size, *(token.id + 1 for token in self._added)])
        self.bos_id, self.eos_id = bos_id, eos_id
        self.files = files
        self.prefix_ids, self.suffix_ids = prefix_ids, suffix_ids
        self.joins_bytes = True

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            add_special_tokens: add begin and end tokens as Hugging Face does for this tokenizer.
            parse_special: a special token written in the text becomes its id; False keeps it text.

        Raises:
            RequestError: ``text`` is not a string, or has half a UTF-16 pair.
        """
        check_text(text)
        ids = self.encode_parts(self.split_special(text) if parse_special else [text])
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of a prompt in parts: an int is a token, a string is text whose special tokens stay text.

        Each string is encoded by itself; only the first part gets what some tokenizers put before a text.
        """
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            elif part:
                check_text(part)
                ids += self._encode_literal(part, first=index == 0)
        return ids

    def split_special(self, text: str) -> list[str | int]:
        """``text`` cut at its special tokens, which become ids; for ``encode_parts``."""
        return split_at(text, self._special_pattern, self._specials)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; invalid UTF-8 becomes U+FFFD, and ids outside the vocabulary nothing."""
        stream = self.text_stream()
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and self.is_special(i)))
        return stream.feed(data) + stream.flush()

    def token_text(self, token_id: int) -> str:
        """Text of one token for display: its leading space kept, half characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, perhaps part of a character; empty outside the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            index = int(token_id)
            if index in self._added_texts:
                data = self._added_texts[index].encode()
            else:
                data = self._vocabulary_bytes(index) if 0 <= index < self.vocab_size else b""
            self._bytes[token_id] = data
        return data

    def is_special(self, token_id: int) -> bool:
        """Whether decoding skips this id."""
        return token_id in self._special_ids

    def text_stream(self) -> Utf8Stream:
        """A fresh stream that turns this tokenizer's bytes into text."""
        return Utf8Stream()

    def _encode_literal(self, text: str, *, first: bool) -> list[int]:
        """Ids of text whose special tokens stay text, even where the vocabulary itself would build one."""
        ids = self._encode_text(text, first=first)
        starts = [m.start() for m in self._special_pattern.finditer(text) if self.special_tokens[m[0]] in ids]
        if not starts:
            return ids
        cuts = [0, *(start + 1 for start in starts), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(cuts) if a < b]
        return [i for n, p in enumerate(pieces) for i in self._encode_text(p, first=first and n == 0)]

    @abstractmethod
    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        """Ids of non-empty text without parsing special tokens; ``first``: it starts the sequence."""

    @abstractmethod
    def _vocabulary_bytes(self, token_id: int) -> bytes:
        """Bytes of an id of the vocabulary proper; empty for a gap in it."""


@contextmanager
def library_errors(what: str, kind: type[IngotError] = RequestError, fix: str = _OTHER) -> Iterator[None]:
    """Turns what a tokenizer library raises into our error, even a Rust panic, which is no ``Exception`` and
    whose class cannot be imported.
    """
    try:
        yield
    except (IngotError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        seen = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise kind(what, seen=seen, fix=fix) from error


def check_text(text: object) -> None:
    """Raise ``RequestError`` for what is not a string, or has a lone surrogate."""
    if not isinstance(text, str):
        raise RequestError("text to encode must be a string", seen=type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "text holds half of a UTF-16 surrogate pair, which is not a character",
            seen=f"{text[error.start]!r} at character {error.start}",
            fix="send valid Unicode",
        ) from None


def token_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest that fits."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def split_at(text: str, pattern: re.Pattern[str], tokens: Mapping[str, AddedToken]) -> list[str | int]:
    """Non-empty strings of ``text`` between the tokens that ``pattern`` finds, and the ids of these."""
    parts: list[str | int] = []
    end = 0
    for match in pattern.finditer(text):
        token = tokens[match[0]]
        before = text[end : match.start()]
        parts += [before.rstrip() if token.lstrip else before, token.id]
        end = match.end()
        if token.rstrip:
            end += len(text[end:]) - len(text[end:].lstrip())
    return [part for part in (*parts, text[end:]) if part != ""]
