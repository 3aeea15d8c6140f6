"""The drawn lengths have the means that they claim, and make a load."""

from __future__ import annotations

import statistics
from pathlib import Path
from random import Random

import pytest

from benchmarks import sharegpt_lengths
from ingot.measure.bench.sharegpt import RequestLimits, by_characters, limited_load


@pytest.mark.parametrize(("mean", "spread"), [sharegpt_lengths.PROMPT, sharegpt_lengths.ANSWER])
def test_means_and_least(mean: float, spread: float) -> None:
    random = Random(1)
    drawn = [sharegpt_lengths.drawn(random, mean, spread) for _ in range(40_000)]
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.05)
    assert min(drawn) >= 4


def test_the_file_is_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        monkeypatch.setattr("sys.argv", ["sharegpt_lengths.py", str(file), "--count", "20"])
        sharegpt_lengths.main()
    limits = RequestLimits(max_prompt=10_000, max_new=10_000)
    load, _ = limited_load(files[0], files[0].read_bytes(), by_characters, limits)
    assert len(load.asks) == 20
    assert files[0].read_text() == files[1].read_text()
