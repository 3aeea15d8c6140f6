"""``general.sampling`` of a GGUF file: an engine's own sampling values, as generation_config.json gives."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot import LLM, build
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.sampling_params import SamplingParams
from ingot.errors import CheckpointError
from tests.e2e.terminal import ingot
from tests.gguf.gguf_files import tiny, write_gguf

F32 = {name: float(np.float32(value)) for name, value in {"temp": 0.7, "top_p": 0.8, "min_p": 0.05}.items()}


def written(folder: Path, **values: Any) -> Path:
    path = folder / "model.gguf"
    write_gguf(path, tiny("qwen3"), "F32", metadata={f"general.sampling.{k}": v for k, v in values.items()})
    return path


def test_they_are_the_engines_defaults(tmp_path: Path) -> None:
    """Decimals are those that were written, not their float32."""
    path = written(tmp_path, **F32, top_k=20, penalty_repeat=1.5, sequence="top_k;top_p;temperature")
    engine = build(path, tmp_path / "engine", device="cpu", proof=False)
    expected = SamplingParams(temperature=0.7, top_p=0.8, min_p=0.05, top_k=20, repetition_penalty=1.5)
    for place in (path, engine):
        llm = LLM(place, "cpu")
        assert llm.default_params == expected
        llm.close()
    shown = " ".join(ingot("inspect", engine).stdout.split())
    assert "temperature 0.7, top_k 20, top_p 0.8, min_p 0.05, repetition_penalty 1.5" in shown


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"penalty_repeat": 1.25}, {"repetition_penalty": 1.25}),
        ({"temp": 0.0, "top_k": 20, "penalty_repeat": 1.25}, {"repetition_penalty": 1.25}),
        ({"temp": -1.0}, {}),
        ({"top_k": 20}, {"do_sample": True, "top_k": 20}),
        ({"temp": 0.5}, {"do_sample": True, "temperature": 0.5}),
        ({"mirostat": 0, "xtc_probability": 0.0, "penalty_last_n": 64}, {}),
    ],
)
def test_what_they_become(
    values: dict[str, Any], expected: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_checkpoint(written(tmp_path, **values)) as source:
        assert source.generation_config == expected
    assert "not applied" not in caplog.text


def test_samplers_that_ingot_does_not_have_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, mirostat=2, xtc_probability=0.5, penalty_repeat=1.25, penalty_last_n=64)
    with caplog.at_level(logging.WARNING):
        open_checkpoint(path).close()
    for words in ("mirostat 2", "xtc_probability 0.5", "penalty_last_n 64 (the penalty covers prompt"):
        assert f"general.sampling.{words}" in caplog.text


@pytest.mark.parametrize("value", ["hot", True, [1, 2], float("nan"), float("inf")])
def test_values_that_are_no_numbers(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unsupported general\.sampling\.temp in .*allowed: a number"):
        open_checkpoint(written(tmp_path, temp=value))


def test_values_out_of_range_are_not_taken(tmp_path: Path) -> None:
    llm = LLM(written(tmp_path, temp=0.5, top_p=7.0), "cpu")
    assert llm.default_params == SamplingParams(temperature=0.5)
    llm.close()
