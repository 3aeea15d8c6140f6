"""A tokenizer from another folder than the checkpoint's: the same engine as with its own, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ingot import LLM, build
from ingot.engine.engine_text import TextParts
from ingot.errors import ConfigError, RequestError
from ingot.text.tokenizer.tokenizer import load_foreign_tokenizer
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.tiny_models import save_model, tiny_config

VOCABULARY = "qwen.tiktoken"


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("complete") / "tiny", seed=4)


@pytest.fixture(scope="module")
def bare(complete: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare") / "tiny"
    shutil.copytree(complete, folder)
    (folder / VOCABULARY).unlink()
    return folder


@pytest.fixture(scope="module")
def tokenizer(complete: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer's files and no weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in (VOCABULARY, "config.json", "generation_config.json"):
        shutil.copy(complete / name, folder)
    return folder


@pytest.mark.parametrize("path", [".", "no/such/folder"])
def test_a_folder_without_a_tokenizer_is_refused(complete: Path, tmp_path: Path, path: str) -> None:
    place = tmp_path / path
    with pytest.raises(ConfigError, match="tokenizer"):
        LLM(complete, "cpu", tokenizer=place)
    result = ingot("build", complete, "-o", tmp_path / "e", "--tokenizer", place, "--device", "cpu")
    assert result.exit_code == 2
    assert "--tokenizer" in result.stderr
    assert not (tmp_path / "e").exists()


def test_a_build_with_it_is_the_build_of_the_complete_checkpoint(
    complete: Path, bare: Path, tokenizer: Path, tmp_path: Path
) -> None:
    own = build(complete, tmp_path / "own", device="cpu")
    result = ingot("build", bare, "-o", tmp_path / "e", "--tokenizer", tokenizer, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    names = {file.relative_to(own) for file in own.rglob("*") if file.is_file()} - {Path("verify.json")}
    assert {Path("tokenizer") / VOCABULARY, Path("manifest.json"), Path("proof.json")} <= names
    for name in names:
        assert (own / name).read_bytes() == (tmp_path / "e" / name).read_bytes(), name
    assert LLM(tmp_path / "e", "cpu").chat_ids([{"role": "user", "content": "é"}]) == LLM(
        own, "cpu"
    ).chat_ids([{"role": "user", "content": "é"}])


def test_a_checkpoint_in_memory_takes_it_and_an_engine_does_not(
    complete: Path, bare: Path, tokenizer: Path, tmp_path: Path
) -> None:
    llm = LLM(bare, "cpu", tokenizer=tokenizer)
    assert llm.generate("Hello")[0].text == LLM(complete, "cpu").generate("Hello")[0].text
    engine = build(complete, tmp_path / "engine", device="cpu", proof=False)
    with pytest.raises(ConfigError, match="fixed when an engine is built"):
        LLM(engine, "cpu", tokenizer=tokenizer)


def test_its_chat_template_comes_with_it(complete: Path, tokenizer: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tokenizer, other)
    template = "Q: {{ messages[0]['content'] }} A:"
    (other / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (other / "generation_config.json").unlink()
    engine = build(complete, tmp_path / "engine", device="cpu", proof=False, tokenizer=other)
    for llm in (LLM(engine, "cpu"), LLM(complete, "cpu", tokenizer=other)):
        ids = llm.chat_ids([{"role": "user", "content": "é"}])
        assert bytes(ids) == "Q: é A:".encode()  # an id per byte
        llm.close()


def test_more_tokens_than_the_embedding_has_rows(tokenizer: Path, tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path / "llama", seed=1)  # 97 rows
    with pytest.raises(ConfigError, match=r"464 tokens[^$]*at most 97"):
        build(tmp_path / "llama", tmp_path / "engine", device="cpu", tokenizer=tokenizer)
    assert not (tmp_path / "engine").exists()


def test_a_checkpoint_s_own_tokenizer_names_the_tokens_that_cannot_be_used(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Llama-2's with a padding token that its embedding has no row for."""
    save_model(tiny_config("llama"), tmp_path / "llama", seed=1)  # 97 rows
    shutil.copy(tokenizer / VOCABULARY, tmp_path / "llama")
    build(tmp_path / "llama", tmp_path / "engine", device="cpu", proof=False)
    llm = LLM(tmp_path / "llama", "cpu")
    note = (
        f"{tmp_path / 'llama'}: the embedding's 97 rows leave out tokens of the tokenizer, and requests with "
        "them are refused: 97 'a', 98 'b', 99 'c', 100 'd' and 363 more"
    )
    assert [record.getMessage() for record in caplog.records] == [note, note]
    assert llm.generate("A", max_new_tokens=1)
    with pytest.raises(
        RequestError, match=r"token ids outside the vocabulary; seen: \[97\]; allowed: 0 to 96"
    ):
        llm.generate("a", max_new_tokens=1)


def test_one_token_more_than_the_embedding_has_rows_is_named(tokenizer: Path) -> None:
    text = TextParts(load_foreign_tokenizer(tokenizer), None, ())
    assert text.tokenizer is not None
    count = text.tokenizer.vocab_size
    (note,) = text.notes(count - 1)
    assert f"{count - 1} rows" in note
    assert note.endswith(f"are refused: {count - 1} {text.tokenizer.token_text(count - 1)!r}")
    assert list(text.notes(count)) == []


def test_a_tokenizer_that_fits_needs_no_note(complete: Path, caplog: pytest.LogCaptureFixture) -> None:
    LLM(complete, "cpu").close()
    assert caplog.records == []


def test_prove_measures_with_it(bare: Path, tokenizer: Path, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"text": "Some running text. " * 4}) + "\n")
    words = ("build", bare, "-o", tmp_path / "e", "--prove", data, "--device", "cpu")
    assert ingot(*words).exit_code == 2  # there is no tokenizer for its text
    result = ingot(*words, "--tokenizer", tokenizer)
    assert result.exit_code == 0, result.stderr
    assert "perplexity" in result.stdout
