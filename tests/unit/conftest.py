"""Tokenizers of the third-party test data, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.unit.vocabularies import load, qwen2_slow_folder


@pytest.fixture(scope="session")
def llama(data: Path) -> Tokenizer:
    return load(data / "tokenizers" / "llama")


@pytest.fixture(scope="session")
def qwen1(data: Path) -> Tokenizer:
    return load(data / "tokenizers" / "qwen-v1")


@pytest.fixture(scope="session")
def gpt2(data: Path) -> Tokenizer:
    return load(data / "tokenizers" / "gpt2")


@pytest.fixture(scope="session")
def qwen2_folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2's vocab.json with merges.txt."""
    return qwen2_slow_folder(data, tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="session")
def qwen2(qwen2_folder: Path) -> Tokenizer:
    return load(qwen2_folder)
