"""An engine whose bytes changed does not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot import LLM, build
from ingot.errors import ConfigError, EngineError
from tests.e2e.tiny import write_tiny


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return build(write_tiny(tmp_path / "checkpoint"), tmp_path / "engine")


def test_one_flipped_bit_is_found_by_its_hash(engine: Path) -> None:
    weights = engine / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(EngineError, match="hashes differ; seen: 1 of"):
        LLM(engine, device="cpu")


def test_an_engine_as_built_runs(engine: Path) -> None:
    assert repr(LLM(engine, device="cpu")).startswith("LLM(qwen, cpu, fp32")


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "checkpoint", seq_length=64)
    with pytest.raises(ConfigError, match="exceeds the model's positions"):
        build(checkpoint, tmp_path / "engine", max_seq_len=100_000)
