"""The random checkpoint of the benchmarks is one that builds."""

from __future__ import annotations

from pathlib import Path

import torch

from ingot import LLM, SamplingParams, build
from ingot.config.quant import QuantConfig
from recipes.random_checkpoint import SHAPES, write_checkpoint, write_samples


def test_it_builds_and_runs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", "tiny")
    llm = LLM(build(tmp_path / "checkpoint", tmp_path / "engine"), device="cpu")
    config = llm.engine.manifest.model
    assert config.hidden_size == SHAPES["tiny"]["hidden_size"]
    assert llm.engine.manifest.build.dtype == "fp16"
    output = llm.generate([1, 2, 3], SamplingParams(max_new_tokens=5))[0]
    assert len(output.token_ids) == 5
    assert output.text is None
    assert torch.isfinite(llm.logits([1, 2, 3])).all()


def test_its_samples_calibrate(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", "tiny")
    write_samples(tmp_path / "samples.jsonl", SHAPES["tiny"]["vocab_size"], samples=3, length=20)
    found = {"quant": QuantConfig("w8a8", method="smoothquant"), "calib": tmp_path / "samples.jsonl"}
    llm = LLM(build(tmp_path / "checkpoint", tmp_path / "engine", device="cpu", **found), device="cpu")
    entry = llm.engine.manifest.calibration
    assert entry is not None
    assert (entry.samples, entry.tokens) == (3, 60)
