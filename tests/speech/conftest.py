"""Folders that hold Whisper's published vocabularies, and a tiny Whisper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.engine.builder import build
from ingot.processors.tokenizer import Tokenizer, load_tokenizer
from tests.encoders.speech import write_speech

SIZES = {"gpt2": 51864, "multilingual": 51865}


@pytest.fixture(scope="session")
def tokenizers(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """By the vocabulary's name."""
    found = {}
    for name, size in SIZES.items():
        folder = tmp_path_factory.mktemp(name)
        source = data / "tokenizers" / "whisper" / f"{name}.tiktoken"
        (folder / source.name).write_bytes(source.read_bytes())
        (folder / "config.json").write_text(json.dumps({"model_type": "whisper", "vocab_size": size}))
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        found[name] = tokenizer
    return found


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper of random weights that hears 0.8 seconds; without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-whisper")
    write_speech(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint: Path) -> Path:
    """Its engine in fp32, with a proof."""
    return build(tiny_checkpoint, tiny_checkpoint.with_name("tiny-whisper-engine"), device="cpu")
