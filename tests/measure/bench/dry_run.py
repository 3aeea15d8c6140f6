"""A benchmark's script, run without timing."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def dry_run(script: str, cases: str, found: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The cases that it writes to ``found``."""
    path = str(BENCHMARKS / script)
    monkeypatch.setattr(sys, "argv", [path, "--dry", "--cases", cases, "--json", str(found)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(path, run_name="__main__")
    return json.loads(found.read_text(encoding="utf-8"))["cases"]
