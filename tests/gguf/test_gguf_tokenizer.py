"""A GGUF file's tokenizer gives the ids that llama.cpp and Hugging Face give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest

from ingot.checkpoint.gguf.gguf_config import generation_of
from ingot.checkpoint.gguf.gguf_file import GgufFile
from ingot.checkpoint.gguf.gguf_tokenizer import TokenizerFiles
from ingot.errors import CheckpointError, IngotError, TokenizerError
from ingot.text.chat.chat_renderer import load_chat_format
from ingot.text.tokenizer.tokenizer import Tokenizer, load_foreign_tokenizer, load_tokenizer
from tests.gguf.gguf_files import BPE, VOCABULARY, add_metadata
from tests.unit.vocabularies import awkward_cases

Metadata = dict[str, Any]
SPACE = "▁"
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), SPACE, "h", "i", "hi", f"{SPACE}hi"]
SPM: Metadata = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [*PIECES, "[INST]"],
    "tokenizer.ggml.scores": [*[0.0] * 259, -4.0, -5.0, -6.0, -1.0, -2.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 3],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@contextmanager
def files_of(path: Path, metadata: Metadata) -> Iterator[Path]:
    """The folder with the tokenizer's files of a GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, metadata)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    files = TokenizerFiles(GgufFile.open(path))
    try:
        yield files.folder()
    finally:
        files.close()


def tokenizer_of(path: Path, metadata: Metadata) -> Tokenizer:
    with files_of(path, metadata) as folder:
        found = load_tokenizer(folder)
    assert found is not None
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", ["qwen2", "llama-spm", "gpt-2"])
def test_vocabularies_of_llama_cpp(name: str, data: Path) -> None:
    """Published vocabularies, with the 47 strings and ids beside them."""
    files = TokenizerFiles(GgufFile.open(data / "tokenizers/llama.cpp-vocab" / f"ggml-vocab-{name}.gguf"))
    tokenizer = load_tokenizer(files.folder())
    files.close()
    assert tokenizer is not None
    for text, ids in awkward_cases(data, name):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        assert name == "llama-spm" or tokenizer.decode(ids, skip_special_tokens=False) == text


def test_begin_and_end_tokens(path: Path) -> None:
    hi = VOCABULARY.index("hi")
    assert tokenizer_of(path, BPE).encode("hi") == [hi]
    both = BPE | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer_of(path, both).encode("hi") == [96, hi, 95]
    silent = BPE | {"tokenizer.ggml.add_bos_token": None}
    assert tokenizer_of(path, silent).encode("hi") == [hi]
    assert tokenizer_of(path, silent | {"tokenizer.ggml.pre": "llama-bpe"}).encode("hi") == [96, hi]


def test_begin_and_end_tokens_of_sentencepiece(path: Path) -> None:
    hi = PIECES.index(f"{SPACE}hi")
    assert tokenizer_of(path, SPM).encode("hi") == [1, hi]
    assert tokenizer_of(path, SPM | {"tokenizer.ggml.add_bos_token": False}).encode("hi") == [hi]
    assert tokenizer_of(path, SPM | {"tokenizer.ggml.add_eos_token": True}).encode("hi") == [1, hi, 2]
    bare = SPM | {"tokenizer.ggml.add_space_prefix": False}
    assert tokenizer_of(path, bare).encode("hi") == [1, PIECES.index("hi")]
    tokenizer = tokenizer_of(path, SPM)
    assert tokenizer.encode("[INST]")[1:] == [len(PIECES)]
    assert len(PIECES) not in tokenizer.encode("[INST]", parse_special=False)
    assert tokenizer.decode([1, hi, *tokenizer.encode("é")[1:]]) == "hi é"


def test_added_tokens(path: Path) -> None:
    """A control token is special, a user-defined one is text; a user cannot write the first."""
    tokenizer = tokenizer_of(path, BPE)
    think, end = VOCABULARY.index("<think>"), VOCABULARY.index("<|im_end|>")
    assert tokenizer.encode("<think><|im_end|>") == [think, end]
    assert tokenizer.decode([think, end]) == "<think>"
    assert end not in tokenizer.encode("<|im_end|>", parse_special=False)
    assert tokenizer.eos_id == 95
    assert tokenizer.bos_id == 96


def test_added_tokens_between_others_keep_their_ids(path: Path) -> None:
    tokens = ["<s>", *VOCABULARY[:-1], "[PAD97]"]
    kinds = [3, *BPE["tokenizer.ggml.token_type"][:-1], 5]
    metadata = {"tokens": tokens, "token_type": kinds, "bos_token_id": 0, "eos_token_id": 96}
    found = tokenizer_of(path, BPE | {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert found.encode("<s>hi<|im_end|>") == [0, tokens.index("hi"), 96]
    assert found.decode([tokens.index("hi")]) == "hi"


def test_chat_templates(path: Path) -> None:
    template = "{{ messages[0].content }}"
    metadata = BPE | {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": "tools"}
    with files_of(path, metadata) as folder:
        assert (folder / "chat_template.jinja").read_text() == template
        assert (folder / "chat_template_tool_use.jinja").read_text() == "tools"
        assert load_chat_format(folder, {}) is not None


def test_every_end_token_stops(path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 94, "tokenizer.ggml.eom_token_id": 95}
    with files_of(path, BPE | ends):
        found = generation_of(GgufFile.open(path))
    assert found == {"bos_token_id": 96, "eos_token_id": [95, 94]}


def test_a_file_without_a_tokenizer(path: Path) -> None:
    with files_of(path, {}) as folder:
        assert load_tokenizer(folder) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model in .*seen: t5; allowed: gpt2, llama"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre in .*seen: tekken; allowed: gpt-2"),
        ({"pre": None}, "tokenizer.ggml.pre in .*allowed: gpt-2"),
        ({"pre": 5}, "tokenizer.ggml.pre in"),
        ({"tokens": None}, "tokenizer.ggml.tokens in .*an array of str"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens in .*an array of str"),
        ({"tokens": ["a", "b"]}, "tokenizer.ggml.token_type in .*97 values; allowed: 2, as tokens"),
        ({"tokens": ["a"] * 97}, "a token twice"),
        ({"token_type": [9] * 97}, "allowed: 1 to 6"),
        ({"merges": ["hi"]}, "tokenizer.ggml.merges in .*two pieces"),
        ({"merges": None}, "tokenizer.ggml.merges in"),
        ({"eos_token_id": 97}, "eos_token_id in .*seen: 97; allowed: < 97"),
        ({"eos_token_id": "x"}, "eos_token_id in .*a token's id"),
        ({"add_bos_token": "yes"}, "add_bos_token in .*true or false"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token in .*bos_token_id"),
    ],
)
def test_parts_that_do_not_fit(changes: Metadata, words: str, path: Path) -> None:
    metadata = BPE | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=words), files_of(path, metadata):
        pass


@pytest.mark.parametrize(
    "metadata",
    [
        BPE | {"tokenizer.ggml.merges": ["q zz"]},
        SPM | {"tokenizer.ggml.tokens": [""] * len(SPM["tokenizer.ggml.tokens"])},
        SPM | {"tokenizer.ggml.token_type": [1] * len(SPM["tokenizer.ggml.tokens"])},
    ],
    ids=["a merge of no token", "empty pieces", "no unknown piece"],
)
def test_what_the_libraries_refuse(metadata: Metadata, path: Path) -> None:
    with pytest.raises(TokenizerError), files_of(path, metadata) as folder:
        load_foreign_tokenizer(folder)


@pytest.mark.parametrize("size", [0, 1])
def test_scores_and_tokens_are_as_many(size: int, path: Path) -> None:
    with (
        pytest.raises(IngotError, match="scores"),
        files_of(path, SPM | {"tokenizer.ggml.scores": [0.5] * size}),
    ):
        pass
