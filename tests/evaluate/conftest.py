"""Tiny models that several files use; they run fastest on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.tiny import write_tiny
from tests.tiny_models import save_model, tiny_config


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """One thread for every test of this folder."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
