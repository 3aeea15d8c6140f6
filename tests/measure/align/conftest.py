"""Tiny checkpoints by architecture, and copies of them with something wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.tiny import write_tiny
from tests.tiny_models import save_model, tiny_config

Weights = dict[str, torch.Tensor]
Spoil = Callable[[str, Callable[[Weights], None]], Path]


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random checkpoints by architecture."""
    root = tmp_path_factory.mktemp("originals")
    for kind in ("gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3", "opt"):
        save_model(tiny_config(kind), root / kind, seed=1)
    write_tiny(root / "qwen")
    return {path.name: path for path in root.iterdir()}


def at(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], None]:
    """A change of one tensor."""
    return lambda weights: weights.update({name: change(weights[name])})


@pytest.fixture
def spoil(originals: dict[str, Path], tmp_path: Path) -> Spoil:
    """spoil("llama", change): a copy of a checkpoint whose weights were changed in place."""

    def make(kind: str, change: Callable[[Weights], None]) -> Path:
        folder = tmp_path / "spoilt"
        shutil.copytree(originals[kind], folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        whole = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.fixture
def unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """``align`` looks for no cause of what it finds: half of its time where something is wrong."""
    monkeypatch.setattr("ingot.measure.align.align_session.explain_first", lambda *_: None)
