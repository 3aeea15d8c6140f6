"""Tiny models and data that several files use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import write_tiny
from tests.tiny_models import save_model, tiny_config


def write(path: Path, *records: dict[str, Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))
    return path


def write_ids(path: Path, *texts: list[int]) -> Path:
    """A file of token ids."""
    return write(path, *({"token_ids": text} for text in texts))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of two layers without a tokenizer: data for it are token ids."""
    folder = tmp_path_factory.mktemp("llama")
    save_model(tiny_config("llama"), folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    folder = tmp_path_factory.mktemp("other")
    save_model(tiny_config("llama"), folder, seed=2)
    return folder


@pytest.fixture(scope="session")
def chatter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen v1 with a vocabulary of bytes that chats nonsense."""
    return write_tiny(tmp_path_factory.mktemp("chatter") / "tiny", seed=3)
