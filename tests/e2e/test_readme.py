"""README's Python program: it runs, and a type checker takes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    return str(code)


def test_the_readmes_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    exec(compile(program(), "README.md", "exec"), {"__name__": "readme"})
    shown = capsys.readouterr().out
    assert shown.startswith("12 + 30 = 42.")
    assert "1/3\n2/3\n3/3\n" in shown
    assert "layers.0" in shown.splitlines()[-1]


@pytest.mark.slow  # mypy reads all of Ingot
def test_mypy_takes_the_readmes_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program(), encoding="utf-8")
    words = ["--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}", tmp_path / "program.py"]
    command = [sys.executable, "-m", "mypy", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
