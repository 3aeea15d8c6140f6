"""The random checkpoint of the benchmarks is one that builds."""

from __future__ import annotations

from pathlib import Path

import torch

from ingot import LLM, SamplingParams, build
from recipes.random_checkpoint import SHAPES, write_checkpoint


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
