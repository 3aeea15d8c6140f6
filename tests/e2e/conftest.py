"""Tiny models that several files use; they run fastest on one thread."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, build
from ingot.config.runtime import RuntimeConfig
from tests.e2e.mixed import Make
from tests.tiny_models import save_model, tiny_config


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """One thread for every test of this folder."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of two layers, in shards, without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(tiny_config("llama"), folder, seed=1, max_shard_size="16KB")
    return folder


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path) -> Path:
    """A fresh engine of it."""
    return build(checkpoint, tmp_path / "engine", device="cpu", max_batch_size=4)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random checkpoints by kind."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("gpt2", "llama", "qwen3", "gemma2"):
        save_model(tiny_config(kind), root / kind, seed=1)
    save_model(tiny_config("mistral", sliding_window=11), root / "window", seed=1)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="session")
def make(folders: dict[str, Path]) -> Make:
    """make(kind, device, token_budget=...): an LLM, made once for the same arguments."""

    @functools.cache
    def made(
        kind: str | Path, device: str = "cpu", batch: int = 8, dtype: str = "fp32", **runtime: Any
    ) -> LLM:
        values = {"block_size": 16, "cache_tokens": 2048} | runtime
        folder = folders[kind] if isinstance(kind, str) else kind
        return LLM(
            folder,
            device,
            compute_dtype=dtype,
            max_batch_size=batch,
            max_seq_len=128,
            runtime=RuntimeConfig(**values),
        )

    return made
