"""Vocabularies for the tests of tokenizers: one folder per layout, and the 47 awkward strings.
folder = qwen2_slow_folder(data, tmp_path)
"""

from __future__ import annotations

import base64
import functools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import tokenizers

from ingot.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

QWEN2_SPECIALS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def awkward_cases(data: Path, name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's test strings and the ids that Hugging Face gives, without special tokens."""
    base = data / "tokenizers" / "llama.cpp-vocab" / f"ggml-vocab-{name}.gguf"
    text = base.with_suffix(".gguf.inp").read_text(encoding="utf-8")
    inputs = text.split("\n__ggml_vocab_test__\n")
    outputs = base.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
    cases = [(i, [int(n) for n in o.split()]) for i, o in zip(inputs, outputs, strict=True)]
    assert len(cases) == 47
    return cases


@functools.cache
def load(folder: Path) -> Tokenizer:
    """The tokenizer that must be in ``folder``."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Key → value of a GGUF file's header."""
    with path.open("rb") as file:
        magic, version, _, num_keys = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF"
        assert version in (2, 3)
        return {_string(file): _value(file, _scalar(file, "I")) for _ in range(num_keys)}


def qwen2_slow_folder(data: Path, folder: Path) -> Path:
    """Qwen2's vocab.json with merges.txt, from the lists inside the GGUF vocabulary."""
    metadata = read_gguf_metadata(data / "tokenizers" / "llama.cpp-vocab" / "ggml-vocab-qwen2.gguf")
    tokens = metadata["tokenizer.ggml.tokens"][: QWEN2_SPECIALS["<|endoftext|>"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    merges = "\n".join(["#version: 0.2", *metadata["tokenizer.ggml.merges"], ""])
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    entries = {str(i): {"content": text, "special": True} for text, i in QWEN2_SPECIALS.items()}
    entries["151646"] = {"content": "<think>", "special": False}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": entries,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def qwen2_fast_folder(slow: Path, folder: Path) -> Path:
    """Qwen2's tokenizer.json, made by transformers from the slow layout."""
    import transformers

    transformers.Qwen2Tokenizer.from_pretrained(str(slow)).save_pretrained(str(folder))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    assert (folder / "tokenizer.json").is_file()
    return folder


def qwen1_folder(folder: Path, merges: Sequence[bytes] = ()) -> Path:
    """Qwen v1's layout: single bytes, then ``merges``."""
    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (folder / "qwen.tiktoken").write_bytes(b"".join(lines))
    return folder


def gpt2_folder(data: Path, folder: Path) -> Path:
    """GPT-2 in Hugging Face's names."""
    source = data / "tokenizers" / "gpt2"
    (folder / "vocab.json").write_bytes((source / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((source / "vocab.bpe").read_bytes())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return folder


def write_opt_tokenizer(folder: Path, **config: Any) -> Path:
    """OPT's layout: GPT-2's class with special tokens of its own in front, then single bytes; one merge."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *letters, "He"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nH e\n")
    entry = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False}
    named = {f"{name}_token": entry | {"content": "</s>"} for name in ("bos", "eos", "unk")}
    settings = {"tokenizer_class": "GPT2Tokenizer", "errors": "replace", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | named | config))
    return folder


def metaspace_folder(folder: Path) -> Path:
    """A word vocabulary whose decoder is Metaspace, which is no joining of bytes."""
    words = ["<unk>", "▁", "▁the", "▁cat", "s", "▁sat", "é", "▁▁", "<s>", "�"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(word, -float(i + 1)) for i, word in enumerate(words)], unk_id=0)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<s>"])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def _scalar(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_scalar(file, "Q")).decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item, length = _scalar(file, "I"), _scalar(file, "Q")
        return [_value(file, item) for _ in range(length)]
    return _scalar(file, _SCALARS[kind])
