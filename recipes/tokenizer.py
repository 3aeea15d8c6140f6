"""The pocket model's tokenizer: a tiktoken vocabulary file and the special tokens that follow its ranks.

Ids: the ranks, then ``<|endoftext|>``, ``<|im_start|>``, ``<|im_end|>``, then 205 ``<|extra_i|>``.

    Tokenizer.load(Path("models/pocket-chat/qwen.tiktoken")).encode("Hello!")
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiktoken

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXTRAS = 205


class Tokenizer:
    """Byte-level BPE ids; ``end_of_text``, ``im_start`` and ``im_end`` are the special ids."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self.end_of_text, self.im_start, self.im_end = (len(ranks) + i for i in range(3))
        names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(EXTRAS))]
        specials = {name: len(ranks) + i for i, name in enumerate(names)}
        self.size = len(ranks) + len(specials)
        self._encoding = tiktoken.Encoding(
            "pocket", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=specials
        )
        self._newline = self.encode("\n")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a ``qwen.tiktoken`` file: a base64 token and its rank per line."""
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        return cls({base64.b64decode(token): int(rank) for token, rank in pairs})

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; the names of special tokens in it are text."""
        return self._encoding.encode_ordinary(unicodedata.normalize("NFC", text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are no valid UTF-8 become U+FFFD."""
        return self._encoding.decode(list(ids))

    def prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The ChatML frame around ``messages``, left open for the assistant's answer."""
        return [*self.frame(messages)[0], *self._newline, self.im_start, *self.encode("assistant\n")]

    def frame(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """Ids of whole messages, and which of them the assistant has to produce (answers and their end)."""
        ids: list[int] = []
        answers: list[bool] = []
        for message in messages:
            if ids:
                ids += self._newline
                answers += [False] * len(self._newline)
            opening = [self.im_start, *self.encode(f"{message['role']}\n")]
            content = [*self.encode(message["content"]), self.im_end]
            ids += opening + content
            answers += [False] * len(opening) + [message["role"] == "assistant"] * len(content)
        return ids, answers
