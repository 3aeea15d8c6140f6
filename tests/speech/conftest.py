"""Folders that hold Whisper's published vocabularies, tiny models, and recordings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soundfile

from ingot.building.builder import build
from ingot.text.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.audio_files import swelling_noise
from tests.encoders.speech import write_multilingual, write_speech

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
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_multilingual(tmp_path_factory.mktemp("whisper"), 3)


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three recordings that differ, of 1 to 2 seconds."""
    folder = tmp_path_factory.mktemp("clips")
    paths = [folder / f"{name}.wav" for name in ("one", "two", "three")]
    for seed, path in enumerate(paths):
        soundfile.write(path, swelling_noise(16000 + 8000 * seed, seed, 3 + seed), 16000)
    return paths


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
