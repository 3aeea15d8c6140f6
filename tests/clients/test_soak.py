"""Ten seconds of what benchmarks/soak.py does for minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ingot import build
from tests.serve.client import ROOT


@pytest.mark.slow
def test_streams_lose_nothing(tmp_path: Path) -> None:
    engine = build(ROOT / "models" / "pocket-chat", tmp_path / "m", device="cpu", max_batch_size=32)
    words = ["benchmarks/soak.py", str(engine), "--seconds", "10", "--new-tokens", "16"]
    # Ten seconds are too short for a slope: caches still fill.
    done = subprocess.run(
        [sys.executable, *words, "--limit", "1000"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
