"""Examples that lack something end with a message, not with a traceback."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("quickstart.py", "{tmp}/nowhere", "{tmp}/engine"), "error: "),
        (("quickstart.py", "only one"), "python examples/quickstart.py"),
        (("clients/transcribe.py",), "python examples/clients/transcribe.py"),
        (("clients/transcribe.py", "{tmp}/nothing.wav"), "error: no such file"),
        (("clients/transcribe.py", "{tmp}/some.wav", "http://127.0.0.1:9"), "error: no server answers at"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "some.wav").write_bytes(b"RIFF")
    script, *rest = (word.replace("{tmp}", str(tmp_path)) for word in words)
    monkeypatch.setattr("sys.argv", [script, *rest])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert told in str(ended.value)


def test_what_an_install_promises() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "ingot[serve]" in project["project"]["optional-dependencies"]["web"]
    assert project["tool"]["distutils"]["editable_wheel"] == {"mode": "compat"}  # type checkers find Ingot
