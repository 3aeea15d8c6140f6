"""What the machine can do is measured once for all benchmarks of tiny models."""

from __future__ import annotations

import functools

import pytest

from ingot.bench.ceiling import measure_ceiling

measured_once = functools.cache(measure_ceiling)


@pytest.fixture(autouse=True)
def one_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes most of a second."""
    for module in ("ingot.bench.session", "benchmarks.headline"):
        monkeypatch.setattr(f"{module}.measure_ceiling", measured_once)
