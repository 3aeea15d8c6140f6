"""Folders that hold Whisper's published vocabularies, and no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.processors.tokenizer import Tokenizer, load_tokenizer

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
