"""An engine whose bytes changed does not run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import LLM, build
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError, EngineError
from ingot.llm.verify import verify
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


def test_every_tensor_is_hashed(engine: Path) -> None:
    """By loading and by verify, from the first to the last: a flipped bit in any one is named."""
    path = engine / "weights.safetensors"
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    names = list(Manifest.read(engine).tensors)
    assert set(names) == set(header) - {"__metadata__"}
    for name in names:
        data = bytearray(whole)
        data[start + header[name]["data_offsets"][0]] ^= 1
        path.write_bytes(data)
        with pytest.raises(EngineError, match=re.escape(name)):
            LLM(engine, device="cpu")
        failures = verify(engine, "cpu", note=False).failures
        assert [(f.kind, f.name) for f in failures] == [("tensor", name)]


def test_a_tensor_more_is_told_by_its_name(engine: Path) -> None:
    path = engine / "weights.safetensors"
    save_file({**load_file(path), "spare.weight": torch.ones(1)}, path)
    failures = verify(engine, "cpu", note=False).failures
    assert ("tensor", "spare.weight") in [(f.kind, f.name) for f in failures]
