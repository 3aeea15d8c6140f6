"""Tiny models and engines that several files use."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM, build
from ingot.config.build_config import BuildConfig
from ingot.config.runtime_config import RuntimeConfig
from tests.e2e.mixed import Make
from tests.e2e.tiny import write_tiny
from tests.tiny_models import save_model, tiny_config


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of two layers, in shards, without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(tiny_config("llama"), folder, seed=1, max_shard_size="16KB")
    return folder


@pytest.fixture(scope="session")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of it, which no test changes."""
    return build(checkpoint, tmp_path_factory.mktemp("built") / "engine", device="cpu", max_batch_size=4)


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy of that engine."""
    return Path(shutil.copytree(built, tmp_path / "engine"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen v1 that chats, which no test changes."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def tiny_engine(tiny: Path) -> Path:
    """An engine of it for 4 requests of 128 tokens, which no test changes."""
    return build(tiny, tiny.parent / "engine", max_seq_len=128, max_batch_size=4, device="cpu")


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BuildConfig, RuntimeConfig]]:
    """The limits and the runtime of every engine that is set up from now on."""
    seen: list[tuple[BuildConfig, RuntimeConfig]] = []
    setup = LLM._setup

    def recorded(self: LLM, engine: Any, runtime: RuntimeConfig) -> None:
        seen.append((engine.manifest.build, runtime))
        setup(self, engine, runtime)

    monkeypatch.setattr(LLM, "_setup", recorded)
    return seen


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random checkpoints by kind."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("gpt2", "llama", "opt", "qwen3"):
        save_model(tiny_config(kind), root / kind, seed=1)
    save_model(tiny_config("gemma2"), root / "gemma2", seed=3)  # one that does not repeat itself
    save_model(tiny_config("gemma3"), root / "gemma3", seed=11)
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
        limits = {"max_batch_size": batch, "max_seq_len": 128, "runtime": RuntimeConfig(**values)}
        return LLM(folder, device, compute_dtype=dtype, **limits)

    return made
