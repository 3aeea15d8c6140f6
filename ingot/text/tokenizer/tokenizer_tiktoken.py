"""Vocabularies of tiktoken: those of Qwen v1 and of OpenAI's Whisper."""

from __future__ import annotations

import base64
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from ingot.errors import TokenizerError
from ingot.text.languages import CODES
from ingot.text.tokenizer.tokenizer_base import CANNOT_ENCODE, Tokenizer, library_errors
from ingot.text.tokenizer.tokenizer_folder import COPY_AGAIN, AddedToken, TokenizerFolder

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT = "<|endoftext|>"
NUM_EXTRAS = 205
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WHISPER_LANGUAGES = {51864: 99, 51865: 99, 51866: 100}  # by the size of the model's vocabulary
TIMESTAMPS = 1501  # 0.00 to 30.00


@dataclass(frozen=True)
class TiktokenRules:
    """How a family splits text, whether it normalizes it to NFC first, and its special tokens, which follow
    the last rank; the first of them ends a text.
    """

    split: str
    specials: tuple[str, ...]
    is_normalised: bool = False


QWEN = TiktokenRules(
    QWEN_SPLIT,
    (END_OF_TEXT, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(NUM_EXTRAS))),
    is_normalised=True,
)


def whisper_rules(vocab_size: int | None) -> TiktokenRules:
    """Rules of a published Whisper; raises ``TokenizerError`` where none has this vocabulary size."""
    if vocab_size not in WHISPER_LANGUAGES:
        what = "vocab_size of config.json is of no published Whisper"
        raise TokenizerError(what, seen=vocab_size, allowed=sorted(WHISPER_LANGUAGES))
    names = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    middle = ("startoftranscript", *CODES[: WHISPER_LANGUAGES[vocab_size]], *names)
    times = (f"{index / 50:.2f}" for index in range(TIMESTAMPS))
    return TiktokenRules(GPT2_SPLIT, (END_OF_TEXT, *(f"<|{name}|>" for name in (*middle, *times))))


def whisper_vocabulary(vocab_size: int | None) -> str:
    """The name of OpenAI's file, without its suffix, by the size of the model's vocabulary."""
    return "gpt2" if vocab_size == min(WHISPER_LANGUAGES) else "multilingual"


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
        """Read a .tiktoken file: lines of base64 bytes and their rank, 0 to n-1. Raises ``TokenizerError``: a
        line is malformed, ranks have gaps, or a single byte has none.
        """
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                empty = token == b"="  # the last one of Whisper's multilingual file
                ranks[b"" if empty else base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                what = f"{path}, line {number} is not a base64 token and its rank"
                seen = line[:80].decode("utf-8", "replace")
                raise TokenizerError(what, seen=seen, fix=COPY_AGAIN) from error
        if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
            what = f"{path} does not number its tokens 0 to n-1, each once"
            raise TokenizerError(what, seen=f"{len(ranks)} tokens", fix=COPY_AGAIN)
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            what = f"{path} lacks tokens for single bytes, so some text has no ids"
            seen = f"{len(missing)} missing, the first is byte {missing[0]}"
            raise TokenizerError(what, seen=seen, fix=COPY_AGAIN)
        return cls(ranks, rules, folder.files(path, needs_model_config=needs_model_config))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """See ``Tokenizer.encode``; as in Qwen's, NFC comes before the search for special tokens."""
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
