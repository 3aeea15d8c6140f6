"""What verbs print fits a screen of 40 or 60 columns; a word that is longer stays whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.building.builder import build
from tests.e2e.terminal import ingot


@pytest.fixture(scope="module")
def packed(tiny: Path) -> Path:
    return build(tiny, tiny.parent / "packed", quant="w8a16", max_seq_len=128, device="cpu")


@pytest.mark.grid(1)
@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize(
    "words",
    [
        "inspect {0}",
        "inspect {1} --tensors",
        "plan {0} --gpu 24GiB",
        "plan {1} --gpu 1GiB",
        "diff {0} {1}",
        "verify {0}",
    ],
)
def test_lines_are_no_wider(
    words: str, columns: int, tiny_engine: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_engine.parent)
    monkeypatch.setenv("COLUMNS", str(columns))
    result = ingot(*words.format(tiny_engine.name, packed.name).split())
    assert result.exit_code in (0, 1)
    assert len(result.stdout.splitlines()) > 3
    wide = [line for line in result.stdout.splitlines() if len(line) > columns]
    assert [line for line in wide if len(line.split()) > 1] == []
