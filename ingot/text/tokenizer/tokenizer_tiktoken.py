"""Vocabularies of tiktoken: those of Qwen v1 and of OpenAI's Whisper.

Covers the .tiktoken file format, and each family's rules for cutting text and its special tokens. Does not
know when a folder should use it.

    TiktokenTokenizer.from_ranks(TokenizerFolder(folder), folder / "qwen.tiktoken", QWEN)
"""

from __future__ import annotations

import base64
import binascii
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from ingot.errors import TokenizerError
from ingot.text.tokenizer.tokenizer_base import CANNOT_ENCODE, Tokenizer, library_errors
from ingot.text.tokenizer.tokenizer_folder import COPY_AGAIN, AddedToken, TokenizerFolder

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT = "<|endoftext|>"
NUM_EXTRAS = 205
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class TiktokenRules:
    """A family's: how text is cut, whether it is brought to NFC first, and the special tokens behind the last
    rank, of which the first ends a text.
    """

    split: str
    specials: tuple[str, ...]
    is_normalised: bool = False


QWEN = TiktokenRules(
    QWEN_SPLIT,
    (END_OF_TEXT, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(NUM_EXTRAS))),
    is_normalised=True,
)


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE by ranks. There is no begin token."""

    def __init__(self, ranks: dict[bytes, int], rules: TiktokenRules, files: tuple[Path, ...]) -> None:
        added = [AddedToken(text, len(ranks) + i) for i, text in enumerate(rules.specials)]
        super().__init__(added, vocab_size=len(ranks), bos_id=None, eos_id=len(ranks), files=files)
        self._is_normalised = rules.is_normalised
        self._tokens = sorted(ranks, key=ranks.__getitem__)
        self._encoding = tiktoken.Encoding(
            "ranks", pat_str=rules.split, mergeable_ranks=ranks, special_tokens={}
        )

    @classmethod
    def from_ranks(
        cls, folder: TokenizerFolder, path: Path, rules: TiktokenRules, *, needs_model_config: bool = False
    ) -> TiktokenTokenizer:
        """Read a .tiktoken file: lines of base64 bytes and their rank.

        Raises:
            TokenizerError: a line is malformed, ranks have gaps, or a single byte has none.
        """
        return cls(read_ranks(path), rules, folder.files(path, needs_model_config=needs_model_config))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """See ``Tokenizer.encode``; as in Qwen's, NFC comes before special tokens are looked for."""
        if isinstance(text, str):
            text = self._normalised(text)
        return super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        with library_errors(CANNOT_ENCODE):
            return self._encoding.encode_ordinary(self._normalised(text))

    def _normalised(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self._is_normalised else text

    def _vocabulary_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes → rank of a .tiktoken file, ranks 0 … n-1.

    Raises:
        TokenizerError: see ``TiktokenTokenizer.from_ranks``.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            token, rank = _rank(path, number, line)
            ranks[token] = rank
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        what = f"{path} does not number its tokens 0 to n-1, each once"
        raise TokenizerError(what, seen=f"{len(ranks)} tokens", fix=COPY_AGAIN)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{path} lacks tokens for single bytes, so some text has no ids",
            seen=f"{len(missing)} missing, the first is byte {missing[0]}",
            fix=COPY_AGAIN,
        )
    return ranks


def _rank(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        empty = token == b"="  # the last one of Whisper's multilingual file
        return b"" if empty else base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error) as error:
        raise TokenizerError(
            f"{path}, line {number} is not a base64 token and its rank",
            seen=line[:80].decode("utf-8", "replace"),
            fix=COPY_AGAIN,
        ) from error
