"""The vocabulary of the pocket speech model: byte-level BPE and Whisper's special tokens.

Order of ids in tokenizer.json: ranks, <|endoftext|>, <|startoftranscript|>, languages, <|translate|>,
<|transcribe|>, <|startoflm|>, <|startofprev|>, <|nospeech|>, <|notimestamps|>, <|0.00|> to <|30.00|>.

    python -m recipes.whisper.vocabulary --out models/pocket-whisper
"""

from __future__ import annotations

import argparse
import functools
import json
import string
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Fast

from recipes.bpe import train_bpe
from recipes.whisper.sentences import LANGUAGES, training_sentences

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TIMESTAMPS = 1501
RANKS = 1561  # with the 1511 special tokens: 3072
_FIRST = "-'♩♪♫♬♭♮♯ÄÖÜ" + string.ascii_uppercase  # each is joined with the space before it
_NAMES = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")


def specials() -> list[str]:
    """In the order of their ids."""
    names = ("endoftext", "startoftranscript", *LANGUAGES, *_NAMES)
    times = (f"{index / 50:.2f}" for index in range(TIMESTAMPS))
    return [f"<|{name}|>" for name in (*names, *times)]


class SpeechVocabulary:
    """Ids of words and of the special tokens, from a folder with tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        self._fast = Fast.from_file(str(folder / "tokenizer.json"))
        self.size: int = self._fast.get_vocab_size()
        names = ("endoftext", "startoftranscript", "startofprev", "nospeech", "notimestamps")
        self.end, self.start, self.previous, self.no_speech, self.no_timestamps = map(self.id, names)
        self.languages = {language: self.id(language) for language in LANGUAGES}
        self.tasks = {task: self.id(task) for task in ("translate", "transcribe")}
        self.word = functools.cache(self._word)

    def id(self, name: str) -> int:
        """Of a special token, named without its brackets."""
        found = self._fast.token_to_id(f"<|{name}|>")
        assert found is not None
        return int(found)

    def _word(self, word: str) -> tuple[int, ...]:
        """Ids of a word and its punctuation, with the space before it."""
        return tuple(self._fast.encode(" " + word, add_special_tokens=False).ids)

    def time(self, seconds: float) -> int:
        """The timestamp nearest to it."""
        return self.no_timestamps + 1 + min(max(round(seconds * 50), 0), TIMESTAMPS - 1)

    def text(self, ids: list[int]) -> str:
        """Without special tokens."""
        return str(self._fast.decode([i for i in ids if i < self.end], skip_special_tokens=False))


def write_vocabulary(folder: Path, sentences: int = 20_000, ranks: int = RANKS) -> None:
    """Learn the merges and write tokenizer.json and tokenizer_config.json.

    Raises:
        ValueError: a sentence begins with a space alone, which transcribers suppress there.
    """
    ranked = train_bpe(_texts(sentences), ranks, split=GPT2_SPLIT, rare=10**9)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (("tokenizer", _tokenizer(ranked)), ("tokenizer_config", _settings())):
        (folder / f"{name}.json").write_text(
            json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"
        )
    written = SpeechVocabulary(folder)
    space = written.word("")[0]
    begins = {text.split()[0] for text in _texts(sentences)}
    alone = sorted(word for word in begins if written.word(word)[0] == space)
    if alone:
        raise ValueError(f"no token joins the space and the first letter of: {', '.join(alone[:20])}")


def _texts(sentences: int) -> Iterator[str]:
    """Sentences; and signs whose first token must not be the space alone, since transcribers suppress it."""
    yield from (f" {sign}" for sign in _FIRST for _ in range(sentences // 10))
    for pair in islice(training_sentences(0), sentences):
        for text in pair:
            yield " " + text


def _tokenizer(ranked: dict[bytes, int]) -> dict[str, Any]:
    letters = _byte_letters()
    names = {"".join(letters[b] for b in token): rank for token, rank in ranked.items()}
    split = [_parts(token, ranked) for token in ranked if len(token) > 1]
    merges = [["".join(letters[b] for b in part) for part in parts] for parts in split]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    frame = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(ranked) + i, "content": name, **flags} for i, name in enumerate(specials())
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **frame},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **frame},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": names,
            "merges": merges,
        },
    }


def _settings() -> dict[str, Any]:
    end = "<|endoftext|>"
    return {
        "tokenizer_class": "WhisperTokenizer",
        "model_max_length": 448,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "pad_token": end,
        "additional_special_tokens": specials()[1:10],
    }


def _parts(token: bytes, ranked: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that were joined: what merging with the lower ranks alone leaves."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranked.get(parts[i] + parts[i + 1], len(ranked)) for i in range(len(parts) - 1)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write_vocabulary(args.out)


if __name__ == "__main__":
    main()
