"""The measurement of Whisper runs on a CPU, beside Hugging Face, for every published shape."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import whisper
from ingot.building.ledger_source import read_setting
from ingot.memory.ledger import ledger


def measured(tmp_path: Path, shape: str, **given: Any) -> dict[str, Any]:
    narrow = whisper.narrowed(whisper.SHAPES / f"whisper-{shape}.json", tmp_path)
    wanted = {"device": "cpu", "dtype": "fp32", "quant": None, "kv_dtype": "auto", "against": None}
    wanted |= {"parts": list(whisper.PARTS), "repeats": 2, "small": True, "shape": shape}
    return whisper.measured(argparse.Namespace(**{**wanted, **given}), narrow)


@pytest.mark.slow
def test_windows_are_measured_beside_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transcribed: list[bytes] = []
    noise = whisper.noise

    def seen(count: int, seed: int) -> torch.Tensor:
        samples = noise(count, seed)
        transcribed.extend(one.numpy().tobytes() for one in samples)
        return samples

    monkeypatch.setattr(whisper, "noise", seen)
    record = measured(tmp_path, "tiny", against="hf")
    json.dumps(record)
    runs = 2 * 3 * (1 + 3)  # all tokens and the first, runs, windows
    assert len(transcribed) == 2 * runs
    assert len(set(transcribed)) == runs, "an encoder's output would be found again"
    assert {"command", "machine", "shape", "dtype", "quant"} <= set(record)
    for part, count in (("window", 1), ("windows", 3)):
        for reported in (record[part], record["hf"][part]):
            assert reported["windows"] == count
            assert len(reported["all_seconds"]) == len(reported["first_seconds"]) == 2
            assert reported["all_s"]["least"] <= reported["all_s"]["p50"] <= reported["all_s"]["p90"]
            assert reported["windows_per_s"] == pytest.approx(count / reported["all_s"]["p50"], rel=0.01)
    assert "step" not in record, "of GPUs alone"


@pytest.mark.parametrize("name", whisper.NAMES)
def test_every_shape_is_whispers(name: str) -> None:
    setting = read_setting(str(whisper.SHAPES / f"whisper-{name}.json"), max_batch_size=64)
    assert setting.model.architecture == "whisper"
    assert setting.model.encoder is not None
    assert setting.model.encoder.max_positions == 1500
    assert ledger(setting).of("encoders") > 64 * 1500 * 2 * setting.model.num_layers * setting.model.kv_size
