"""The tokenizer and chat template of a GGUF file, written as the files that Hugging Face would have.

``gpt2``: byte-level BPE as tokenizer.json. ``llama``: SentencePiece as tokenizer.model; llama.cpp starts text
after a special token with a space, as Hugging Face's class does with ``legacy``.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_files import shorten
from ingot.checkpoint.gguf.gguf_config import token_id
from ingot.checkpoint.gguf.gguf_file import GgufFile
from ingot.errors import CheckpointError

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATES = {_TEMPLATE: "chat_template.jinja", f"{_TEMPLATE}.tool_use": "chat_template_tool_use.jinja"}
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_NORMAL, _UNKNOWN, _CONTROL, _ADDED, _UNUSED, _BYTE = range(1, 7)  # token types, as SentencePiece's
_FIX = "convert the model again with a llama.cpp of today, or use its Hugging Face checkpoint"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class WordSplit:
    """What ``tokenizer.ggml.pre`` stands for.

    Attributes:
        pattern: how text is cut before merges; None: as GPT-2 cuts it.
        digits: each digit is cut off first.
        composed: text is brought to NFC.
        whole: a piece that is a token is not made by merges.
        bos: a text begins with the begin token, where the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    composed: bool = False
    whole: bool = False
    bos: bool = False


_LLAMA3 = WordSplit(_WORDS % "{1,3}" + _SPACES, whole=True, bos=True)
_QWEN2 = _WORDS % "" + _SPACES
SPLIT_RULES = {
    "gpt-2": WordSplit(),
    "gpt2": WordSplit(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": WordSplit(_QWEN2, composed=True),
    "deepseek-r1-qwen": WordSplit(_QWEN2, bos=True),
    "smollm": WordSplit(digits=True),
}


class TokenizerFiles:
    """A temporary folder with a file's tokenizer, made when it is first needed."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def folder(self) -> Path:
        """The folder, empty where the file has no tokenizer; CheckpointError as ``write_tokenizer``."""
        if self._folder is None:
            made = tempfile.TemporaryDirectory(prefix="ingot-gguf-")
            try:
                write_tokenizer(self._file, Path(made.name))
            except BaseException:
                made.cleanup()
                raise
            self._folder = made
        return Path(self._folder.name)

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write tokenizer and chat template into ``folder``; nothing where the file has no tokenizer.

    Raises CheckpointError for an unknown kind of tokenizer, or where its parts do not fit one another.
    """
    for key, name in _TEMPLATES.items():
        template = file.metadata.get(key)
        if template is not None:
            if not isinstance(template, str):
                raise _refused(file, key, type(template).__name__, "text")
            (folder / name).write_text(template, encoding="utf-8")
    kind = file.metadata.get(f"{_KEY}model", "none")
    if kind in ("none", "no_vocab"):
        return
    if kind not in ("gpt2", "llama"):
        raise _refused(file, f"{_KEY}model", kind, "gpt2, llama")
    tokens = _Tokens(file)
    if kind == "llama":
        (folder / "tokenizer.model").write_bytes(tokens.sentencepiece())
        config = {"tokenizer_class": "LlamaTokenizer", "legacy": True}
        bos = True
    else:
        rule = tokens.split_rule()
        bos = tokens.flag("add_bos_token", rule.bos)
        tree = tokens.byte_level(rule, bos)
        (folder / "tokenizer.json").write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
        config = {}
    config |= {
        "add_bos_token": tokens.flag("add_bos_token", bos),
        "add_eos_token": tokens.flag("add_eos_token", False),
    }
    config |= {name: text for key, name in _NAMED.items() if (text := tokens.named(key)) is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


class _Tokens:
    """The vocabulary of a file: texts and types by id."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._texts: list[str] = self._list("tokens", str)
        self._types: list[int] = self._list("token_type", int, [_NORMAL] * len(self._texts))
        self._fits("token_type", self._types)
        odd = sorted({kind for kind in self._types if not _NORMAL <= kind <= _BYTE})
        if odd:
            raise _refused(file, f"{_KEY}token_type", odd[:8], "1 to 6")

    def flag(self, name: str, default: bool) -> bool:
        value = self._file.metadata.get(_KEY + name, default)
        if not isinstance(value, bool):
            raise _refused(self._file, _KEY + name, value, "true or false")
        return value

    def named(self, name: str) -> str | None:
        """The text of ``bos``, ``eos`` and the like."""
        found = token_id(self._file, name)
        if found is not None and found >= len(self._texts):
            raise _refused(self._file, f"{_KEY}{name}_token_id", found, f"< {len(self._texts)}")
        return None if found is None else self._texts[found]

    def split_rule(self) -> WordSplit:
        name = self._file.metadata.get(f"{_KEY}pre")
        if not isinstance(name, str) or name not in SPLIT_RULES:
            raise _refused(self._file, f"{_KEY}pre", name, ", ".join(SPLIT_RULES))
        return SPLIT_RULES[name]

    def byte_level(self, rule: WordSplit, bos: bool) -> dict[str, Any]:
        """tokenizer.json."""
        added = [i for i, kind in enumerate(self._types) if kind in (_UNKNOWN, _CONTROL, _ADDED)]
        plain = [i for i, kind in enumerate(self._types) if kind in (_NORMAL, _BYTE)]
        # Added tokens that follow the vocabulary get their ids from their order; others are part of it.
        follow = plain == list(range(len(plain))) and added == list(
            range(len(plain), len(plain) + len(added))
        )
        vocabulary = {self._texts[i]: i for i in (plain if follow else sorted(plain + added))}
        if len(vocabulary) != (len(plain) if follow else len(plain) + len(added)):
            raise _refused(self._file, f"{_KEY}tokens", "a token twice", "texts that differ")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [self._added(i) for i in added],
            "normalizer": {"type": "NFC"} if rule.composed else None,
            "pre_tokenizer": _pre_tokenizer(rule),
            "post_processor": self._framing(bos),
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": rule.whole,
                "vocab": vocabulary,
                "merges": self._merges(),
            },
        }

    def _added(self, token: int) -> dict[str, Any]:
        sides = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = self._types[token] != _ADDED
        return {"id": token, "content": self._texts[token], **sides, "special": special}

    def _framing(self, bos: bool) -> dict[str, Any] | None:
        """What a text begins and ends with."""
        framed = {"bos": bos, "eos": self.flag("add_eos_token", False)}
        texts = {name: self.named(name) for name, wanted in framed.items() if wanted}
        for name, text in texts.items():
            if text is None:
                raise _refused(self._file, f"{_KEY}add_{name}_token", True, f"false, or {name}_token_id")
        if not texts:
            return None
        before, after = (
            [{"SpecialToken": {"id": texts[name], "type_id": 0}}] if name in texts else [] for name in framed
        )
        ids = {
            text: {"id": text, "ids": [token_id(self._file, n)], "tokens": [text]}
            for n, text in texts.items()
        }
        return {
            "type": "TemplateProcessing",
            "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": ids,
        }

    def _merges(self) -> list[list[str]]:
        merges = self._list("merges", str)
        pairs = [merge.split(" ") for merge in merges]
        odd = [merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2]
        if odd:
            raise _refused(self._file, f"{_KEY}merges", shorten(odd, 3), "two pieces with a space between")
        return pairs

    def sentencepiece(self) -> bytes:
        """tokenizer.model: a ``ModelProto`` of sentencepiece_model.proto."""
        scores: list[float] = self._list("scores", float)
        self._fits("scores", scores)
        pieces = zip(self._texts, scores, self._types, strict=True)
        parts = [
            _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _varint(3, kind))
            for text, score, kind in pieces
        ]
        trainer = _varint(3, 2) + _varint(4, len(parts)) + _varint(35, _BYTE in self._types)  # of type BPE
        if _UNKNOWN in self._types:
            trainer += _varint(40, self._types.index(_UNKNOWN))
            trainer += _field(45, self._texts[self._types.index(_UNKNOWN)].encode())
        for name, place in (("bos", 41), ("eos", 42)):
            if (text := self.named(name)) is not None:
                trainer += _varint(place, token_id(self._file, name) or 0) + _field(place + 5, text.encode())
        prefix, fewer = self.flag("add_space_prefix", True), self.flag("remove_extra_whitespaces", False)
        normalizer = _field(1, b"identity") + _varint(3, prefix) + _varint(4, fewer) + _varint(5, 1)
        return b"".join(parts) + _field(2, trainer) + _field(3, normalizer)

    def _list(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        found = self._file.metadata.get(_KEY + name, default)
        if not isinstance(found, list) or not found or not isinstance(found[0], kind):
            seen = None if found is None else type(found).__name__
            raise _refused(self._file, _KEY + name, seen, f"an array of {kind.__name__}")
        return found

    def _fits(self, name: str, values: Sequence[object]) -> None:
        if len(values) != len(self._texts):
            raise _refused(self._file, _KEY + name, f"{len(values)} values", f"{len(self._texts)}, as tokens")


def _pre_tokenizer(rule: WordSplit) -> dict[str, Any]:
    cut: dict[str, Any] = {"type": "Digits", "individual_digits": True}
    if rule.pattern is not None:
        pattern = {"Regex": rule.pattern}
        cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [cut] if rule.pattern is not None or rule.digits else []
    return {"type": "Sequence", "pretokenizers": [*steps, level | {"use_regex": rule.pattern is None}]}


def _varint(place: int, value: int) -> bytes:
    """A protobuf field of a whole number."""
    return _number(place << 3) + _number(int(value))


def _field(place: int, content: bytes) -> bytes:
    """A protobuf field of bytes, text or another message."""
    return _number(place << 3 | 2) + _number(len(content)) + content


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _refused(file: GgufFile, key: str, seen: object, allowed: object) -> CheckpointError:
    return CheckpointError(f"unsupported {key} in {file.path}", seen=seen, allowed=allowed, fix=_FIX)
