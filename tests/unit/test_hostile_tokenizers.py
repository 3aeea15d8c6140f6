"""tokenizer.json files that crash the library that reads them: each is one error, and nothing dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM, build
from ingot.errors import IngotError, RequestError, TokenizerError
from ingot.sandbox.limited_process import ProcessLimits
from ingot.text.tokenizer.tokenizer import load_foreign_tokenizer, load_tokenizer
from tests.tiny_models import save_model, tiny_config
from tests.unit.vocabularies import load

LIMITS = ProcessLimits(seconds=5, memory=512 << 20)
PLAIN: dict[str, Any] = {
    "version": "1.0",
    **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")),
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def steps(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(normalizers)}}


# What these do to a process, they do where no exception can be caught: an abort, or the machine's memory.
DEADLY = {
    "a bomb of a common letter": steps(*[replace({"String": "a"}, "a" * 100)] * 8),
    "a bomb of a rare word": steps(*[replace({"String": "zqzq"}, "zqzq" * 100)] * 8),
    "a bomb of every place": steps(*[replace({"Regex": ""}, "a" * 100)] * 8),
    "text before text": steps(
        {"type": "Prepend", "prepend": "a" * 1_000_000}, replace({"String": "a"}, "a" * 1000)
    ),
    "a table of nothing": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
}
# These raise a panic of Rust, which is no Exception.
PANICS = {
    "a regex without end": {"pre_tokenizer": split("(a+)+b|(a|a)*b|(a*)*b")},
    "no table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a table that points outside": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}
    },
    "a cut of length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a frame of no token": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}


def write(folder: Path, changes: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(PLAIN | changes))
    return folder


@pytest.mark.stays("a bomb of a rare word", "a bomb of every place", "text before text", "a table of nothing")
@pytest.mark.parametrize("name", DEADLY)
def test_what_would_end_the_process_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"MiB of memory|crashes \(SIG") as error:
        load_foreign_tokenizer(write(tmp_path, DEADLY[name]), LIMITS)
    assert len(str(error.value).replace(str(tmp_path), "")) < 300


@pytest.mark.parametrize("name", PANICS)
def test_panics_are_errors(name: str, tmp_path: Path) -> None:
    """At loading where it shows there, else with the text that meets it; a plain one then still works."""
    write(tmp_path, PANICS[name])
    with pytest.raises(IngotError, match=r"tokenizer\.json|cannot encode this text"):
        load(tmp_path).encode("a" * 40 + "\u3000")


def test_a_regex_that_panics_leaves_other_texts_alone(tmp_path: Path) -> None:
    tokenizer = load_foreign_tokenizer(write(tmp_path, PANICS["a regex without end"]), LIMITS)
    assert tokenizer is not None
    with pytest.raises(RequestError, match=r"cannot encode this text.*retry-limit"):
        tokenizer.encode("a" * 40)
    assert tokenizer.encode("a") == [0]


def test_words_that_the_model_has_no_token_for(tmp_path: Path) -> None:
    """The library raises a plain Exception."""
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]], "byte_fallback": False}
    tokenizer = load_foreign_tokenizer(write(tmp_path, {"model": model}), LIMITS)
    assert tokenizer is not None
    with pytest.raises(RequestError, match="unk_id"):
        tokenizer.encode("zebra")


def test_build_and_llm_refuse(tmp_path: Path) -> None:
    """Before anything is written."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_model(tiny_config("llama"), folder, seed=1)
    write(folder, DEADLY["a table of nothing"])
    for call in (lambda: LLM(folder, "cpu"), lambda: build(folder, tmp_path / "engine", device="cpu")):
        with pytest.raises(
            TokenizerError, match=r"the tokenizer in .* (crashes \(SIG|needs more than 2048 MiB)"
        ):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("key", ["²", "1" * 5000, "-1", "x"])
def test_ids_that_are_none(key: str, tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {key: {"content": "<x>"}}}
    (write(tmp_path, {}) / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="added_tokens_decoder"):
        load_tokenizer(tmp_path)


def test_files_too_large_for_a_vocabulary(tmp_path: Path) -> None:
    """Told by their size; this one has no bytes on the disk."""
    for name in ("tokenizer.json", "tokenizer.model", "qwen.tiktoken"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        with (folder / name).open("wb") as file:
            file.truncate(10 << 30)
        with pytest.raises(TokenizerError, match=r"10240 MiB"):
            load_tokenizer(folder)
