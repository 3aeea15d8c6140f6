"""README's first minute and its Python program: they run, and a type checker takes the program."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.terminal import ingot

ROOT = Path(__file__).resolve().parents[2]


def program() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    return str(code)


def test_the_first_minute(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install, build, verify, serve: with a tiny Qwen in place of the published one, which chats as well."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block is not None
    install, *lines = block[1].splitlines()
    assert install.endswith("pip install -c constraints.txt '.[all]'")
    build, verify, serve = (shlex.split(line, comments=True) for line in lines)
    (tmp_path / build[2]).parent.mkdir()
    (tmp_path / build[2]).symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    for words in (build, verify):
        done = ingot(*words[1:], "--device", "cpu")
        assert done.exit_code == 0, done.stderr
    assert "proven engines/small" in done.stdout
    assert serve == ["ingot", "serve", build[-1]]


def test_the_first_screen_has_the_essentials() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = readme[: readme.index("## Start")]
    assert first.count("\n") < 60
    order = [
        "pip install",
        "ingot build",
        "ingot verify",
        "ingot serve",
        "headline-8b",
        "| question |",
        "Next:",
    ]
    assert [first.index(text) for text in order] == sorted(first.index(text) for text in order)


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
