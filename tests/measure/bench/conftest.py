"""A tiny checkpoint, and what the machine can do, for all benchmarks of tiny models."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from ingot.measure.bench.ceiling import Ceiling, measure_ceiling
from tests.tiny_models import save_model, tiny_config

measured_once = functools.cache(measure_ceiling)
MADE_UP = Ceiling(read_gb_s=10.0, matmul_tflop_s=1.0, dtype="fp32", read_bytes=1, matmul_size=1)


@pytest.fixture(autouse=True)
def one_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring it takes most of a second: it is done once, and never for a sweep."""
    for module in ("ingot.measure.bench.bench_session", "benchmarks.headline"):
        monkeypatch.setattr(f"{module}.measure_ceiling", measured_once)
    monkeypatch.setattr("ingot.measure.bench.sweep.sweep_line.measure_ceiling", lambda device, dtype: MADE_UP)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(tiny_config("llama"), folder)
    return folder
