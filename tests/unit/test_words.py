"""Words that only this project used stay out: "Words" in CONTRIBUTING.md says what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {  # pattern → how many may stand in the rooms of ingot/
    r"(?i)\b(told|heard|hears)\b": 5,  # StepRecord.told has its own
    r"\b(Told|Said|Heard|Ears)\b": 0,
    r"(?i)\btwins?\b": 0,
    r"(?i)\bloud\b": 1,  # samples of a recording
    r"\b(Owns|Knows no|Knows nothing)\b": 0,
    r"(?i)\bof no one\b": 0,
    r"(?i)\bno finite number": 0,
    r"(?i)\bwhat (came|comes|has come) of it\b": 0,
}


def code() -> list[Path]:
    """The modules of the package."""
    return [*(ROOT / "ingot").rglob("*.py")]


def pages() -> list[Path]:
    """What users read; the performance log is a diary."""
    return [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def found(pattern: str, files: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        for match in re.finditer(pattern, path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("pattern", LIMITS)
def test_modules_use_the_fields_words(pattern: str) -> None:
    places = found(pattern, code())
    assert len(places) <= LIMITS[pattern], places


@pytest.mark.parametrize("pattern", [word for word in LIMITS if "Owns" not in word])
def test_pages_use_the_fields_words(pattern: str) -> None:
    assert found(pattern, [page for page in pages() if page.name != "architecture.md"]) == []
