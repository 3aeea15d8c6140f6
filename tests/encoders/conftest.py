"""The two tiny models with encoders; that of pictures is registered while these tests run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaForConditionalGeneration, WhisperForConditionalGeneration

from ingot import LLM
from ingot.config.runtime_config import RuntimeConfig
from ingot.models.model_registry import ARCHITECTURES, register
from tests.encoders.pictures import PICTURES, write_pictures
from tests.encoders.speech import write_speech


@dataclass(frozen=True)
class Side:
    """A checkpoint and Hugging Face's model of it."""

    folder: Path
    model: Any

    def open(self, max_batch_size: int = 8, **runtime: Any) -> LLM:
        """Ingot's engine of it, on the CPU, in blocks of 16 tokens."""
        config = RuntimeConfig(block_size=16, **runtime)
        return LLM(self.folder, "cpu", max_batch_size=max_batch_size, runtime=config)


@pytest.fixture(scope="package", autouse=True)
def _registered() -> Iterator[None]:
    register(PICTURES)
    yield
    ARCHITECTURES.remove(PICTURES)


@pytest.fixture(scope="package")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Side:
    folder = tmp_path_factory.mktemp("pictures")
    model: LlavaForConditionalGeneration = write_pictures(folder)
    return Side(folder, model)


@pytest.fixture(scope="package")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Side:
    folder = tmp_path_factory.mktemp("speech")
    model: WhisperForConditionalGeneration = write_speech(folder)
    return Side(folder, model)
