"""Every example runs to its end on the tiny engine."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.tiny import write_tiny

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BUILDERS = ("quickstart.py", "demo.py")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    write_tiny(folder / "checkpoint", seq_length=1024)
    return folder / "engine"


def run(name: str, *words: object) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before, sys.argv = sys.argv, [name, *map(str, words)]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", BUILDERS)
def test_examples_that_build(engine: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, engine.parent / "checkpoint", engine)
    out = capsys.readouterr().out
    assert out.strip()
    if name == "demo.py":
        assert "> Please summarise:" in out
        assert "reference:" in out
        assert "16 at once:" in out
        assert " 0.60 –  2.86 s Our loud egg in Chicago was already small." in out


@pytest.mark.parametrize("name", sorted({f.name for f in EXAMPLES.glob("*.py")} - set(BUILDERS)))
def test_examples_that_use_an_engine(engine: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not engine.exists():
        run("quickstart.py", engine.parent / "checkpoint", engine)
    run(name, engine)
    assert capsys.readouterr().out.strip()


def test_examples_are_short() -> None:
    pages = [f for f in EXAMPLES.glob("*.py") if f.name not in ("demo.py", "langchain_docs.py")]
    lengths = {f.name: len(f.read_text().splitlines()) for f in pages}
    assert len(lengths) >= 6
    assert max(lengths.values()) <= 40


def test_the_demo_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^error: neither an existing folder"):
        run("demo.py", tmp_path / "none", tmp_path / "engine")
