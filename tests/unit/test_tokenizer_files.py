"""What tokenizer files may say, and what a broken one does."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import GPT2Tokenizer

from ingot.errors import TokenizerError
from ingot.text.tokenizer.tokenizer import load_tokenizer
from tests.unit.vocabularies import load, write_opt_tokenizer


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(tmp_path) is None


def test_added_tokens_json(data: Path, tmp_path: Path) -> None:
    """Vicuna v0's [PAD], and an added token that is not special."""
    shutil.copy(data / "tokenizers" / "llama" / "tokenizer.model", tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"[PAD]": 32000, "<tag>": 32001}')
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "[PAD]", "bos_token": ""}')
    tokenizer = load(tmp_path)
    assert tokenizer.vocab_size == 32002
    assert tokenizer.bos_id == 1
    assert tokenizer.special_tokens["[PAD]"] == 32000
    assert "<tag>" not in tokenizer.special_tokens
    assert tokenizer.encode("a[PAD]<tag>")[-2:] == [32000, 32001]
    assert 32001 in tokenizer.encode("a<tag>", parse_special=False)
    assert 32000 not in tokenizer.encode("a[PAD]", parse_special=False)
    assert tokenizer.decode([32000, 32001]) == "<tag>"


def test_bos_and_eos_flags(data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "tokenizers" / "llama" / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert load(tmp_path).encode("Hello") == [15043, 2]
    assert load(tmp_path).encode("") == [2]


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": False}, {}], ids=str)
def test_bos_of_vocab_json_as_transformers(flags: dict[str, bool], tmp_path: Path) -> None:
    """OPT's files: GPT-2's form, with </s> at both ends of a text's life and the flag that puts it first."""
    write_opt_tokenizer(tmp_path, **flags)
    tokenizer, theirs = load(tmp_path), GPT2Tokenizer.from_pretrained(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 2)
    for text in ("", "Hello", "a</s>b <pad>", " two  words\n"):
        assert tokenizer.encode(text) == theirs(text).input_ids, text
    assert tokenizer.encode("Hi", add_special_tokens=False)[:1] != [2]
    assert (tokenizer.encode("Hi")[:1] == [2]) == flags.get("add_bos_token", False)
    assert tokenizer.decode(tokenizer.encode("Hi there")) == "Hi there"


def test_bos_flag_that_is_no_flag(tmp_path: Path) -> None:
    write_opt_tokenizer(tmp_path, add_bos_token="yes")
    with pytest.raises(TokenizerError, match=r"add_bos_token in .* must be true or false; seen: yes"):
        load(tmp_path)


def test_tokenizer_json_gets_tokens_of_its_config(golden: Path, tmp_path: Path) -> None:
    shutil.copy(golden / "llama_aidreams260K" / "hf" / "tokenizer.json", tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(tmp_path)
    assert tokenizer.eos_id == tokenizer.special_tokens["<end>"] == 512
    assert tokenizer.encode("a<end>")[-1] == 512


def test_tokenizer_json_wins(golden: Path, tmp_path: Path) -> None:
    shutil.copy(golden / "llama_aidreams260K" / "hf" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not read")
    assert [path.name for path in load(tmp_path).files] == ["tokenizer.json"]


def test_files_include_chat_templates(data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "tokenizers" / "llama" / "tokenizer.model", tmp_path)
    for name in ("chat_template.jinja", "special_tokens_map.json", "chat_template.json"):
        (tmp_path / name).write_text("{}")
    names = {path.name for path in load(tmp_path).files}
    assert names == {
        "tokenizer.model",
        "chat_template.jinja",
        "special_tokens_map.json",
        "chat_template.json",
    }


def test_small_tiktoken_beside_a_qwen_config(tmp_path: Path) -> None:
    """Special tokens follow the last rank, whatever the size; the copy needs config.json to say so."""
    _write_ranks(tmp_path / "pocket.tiktoken", extra=[b"he", b"hello"])
    (tmp_path / "config.json").write_text('{"model_type": "qwen"}')
    tokenizer = load(tmp_path)
    assert tokenizer.special_tokens["<|endoftext|>"] == 258
    assert tokenizer.special_tokens["<|extra_204|>"] == 258 + 207
    assert tokenizer.encode("he<|im_end|>") == [256, 260]
    assert tokenizer.encode("he<|im_end|>", parse_special=False)[:2] == [256, ord("<")]
    assert {path.name for path in tokenizer.files} == {"pocket.tiktoken", "config.json"}


def _write_ranks(path: Path, extra: list[bytes]) -> None:
    tokens = [bytes([i]) for i in range(256)] + extra
    path.write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens)))


def _broken() -> Iterator[tuple[str, dict[str, str | bytes], str]]:
    good = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    vocab = json.dumps({"a": 0, "b": 1, "ab": 2})
    yield "truncated tokenizer.json", {"tokenizer.json": '{"version": "1.0", "model": {"ty'}, "tokenizer.json"
    yield "empty tokenizer.json", {"tokenizer.json": ""}, "tokenizer.json"
    yield "empty model", {"tokenizer.model": b""}, "tokenizer.model"
    yield "noise as model", {"tokenizer.model": b"\x00\xff noise"}, "tokenizer.model"
    yield "empty tiktoken", {"qwen.tiktoken": ""}, "qwen.tiktoken"
    yield "bad base64", {"qwen.tiktoken": good + "!!! 256\n"}, "line 257"
    yield "no rank", {"qwen.tiktoken": good + "aGU=\n"}, "line 257"
    yield "rank twice", {"qwen.tiktoken": good + "aGU= 255\n"}, "qwen.tiktoken"
    yield "rank gap", {"qwen.tiktoken": good + "aGU= 300\n"}, "qwen.tiktoken"
    yield "cut tiktoken", {"qwen.tiktoken": good[:1000].rsplit("\n", 1)[0]}, "single bytes"
    yield "unknown tiktoken", {"other.tiktoken": good}, "other.tiktoken"
    yield "two tiktokens", {"a.tiktoken": good, "b.tiktoken": good}, "a.tiktoken"
    yield (
        "bad merge",
        {"vocab.json": vocab, "merges.txt": "#version: 0.2\na b\na b c\n"},
        "merges.txt, line 3",
    )
    yield "half merge", {"vocab.json": vocab, "merges.txt": "a\n"}, "merges.txt, line 1"
    yield "merge of unknown", {"vocab.json": vocab, "merges.txt": "a z\n"}, "merges.txt"
    yield "binary merges", {"vocab.json": vocab, "merges.txt": b"\xff\xfe"}, "merges.txt"
    yield "vocabulary list", {"vocab.json": "[1]", "merges.txt": "a b\n"}, "vocab.json"
    yield "vocabulary ids", {"vocab.json": '{"a": "0"}', "merges.txt": "a b\n"}, "vocab.json"
    yield "one id twice", {"vocab.json": '{"a": 0, "b": 0}', "merges.txt": "\n"}, "vocab.json"
    yield "no merges", {"vocab.json": vocab}, "vocab.json"
    yield "bad config", {"tokenizer_config.json": "{", "vocab.json": vocab}, "tokenizer_config.json"
    other = '{"tokenizer_class": "T5Tokenizer"}'
    yield "other class", {"tokenizer_config.json": other, "tokenizer.model": b"x"}, "T5Tokenizer"
    yield (
        "other BPE",
        {"tokenizer_config.json": other, "vocab.json": vocab, "merges.txt": "a b"},
        "T5Tokenizer",
    )


BROKEN = list(_broken())


@pytest.mark.parametrize(("files", "named"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_broken_files(files: dict[str, str | bytes], named: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("added_tokens.json", '{"a": "b"}', "added_tokens.json"),
        ("tokenizer_config.json", '{"legacy": 1}', "legacy"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', None),
        ("special_tokens_map.json", "[]", "special_tokens_map.json"),
    ],
)
def test_broken_side_files(name: str, content: str, named: str | None, data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "tokenizers" / "llama" / "tokenizer.model", tmp_path)
    (tmp_path / name).write_text(content)
    if named is None:
        assert load(tmp_path).vocab_size == 32000
        return
    with pytest.raises(TokenizerError, match=named):
        load_tokenizer(tmp_path)
