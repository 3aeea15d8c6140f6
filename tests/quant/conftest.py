"""Tiny checkpoints, samples to calibrate with, and the engines that are built of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot import build
from ingot.config.quantization.quant_config import QuantConfig
from tests.e2e.tiny import write_tiny
from tests.quant.pocket import Pocket
from tests.tiny_models import random_ids, save_model, tiny_config

Made = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of every kind, which no test changes."""
    root = tmp_path_factory.mktemp("checkpoints")
    write_tiny(root / "qwen")
    for kind in ("llama", "mistral", "qwen2", "qwen3", "gpt2"):
        save_model(tiny_config(kind), root / kind, seed=3)
    save_model(tiny_config("gpt2", activation_function="relu"), root / "relu", seed=3)
    save_model(tiny_config("llama", tie_word_embeddings=True), root / "tied", seed=3)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 samples of 60 token ids."""
    path = tmp_path_factory.mktemp("samples") / "ids.jsonl"
    path.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return path


@pytest.fixture
def made(checkpoints: dict[str, Path], samples: Path, tmp_path: Path) -> Made:
    """made(kind, quant, name, dtype=…): the engine of a tiny checkpoint, on a CPU and without proof.

    What is calibrated gets 6 samples; ``options`` go to ``build``.
    """

    def make(kind: str, quant: str | QuantConfig, name: str = "engine", **options: Any) -> Path:
        quant = QuantConfig(quant) if isinstance(quant, str) else quant
        given: dict[str, Any] = {"device": "cpu", "proof": False}
        if quant.calibrated:
            given |= {"calib": samples, "calib_samples": 6}
        return build(checkpoints[kind], tmp_path / name, quant=quant, **(given | options))

    return make


@pytest.fixture(scope="session")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Pocket:
    """The pocket model's conversations, and what it says to them."""
    return Pocket.of(tmp_path_factory.mktemp("pocket"))
