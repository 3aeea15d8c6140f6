"""Words that only this project used stay out: "Words" in CONTRIBUTING.md says what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_YET = ("measure",)  # rooms whose words are still being changed
LIMITS = {  # pattern → how many may stand in the rooms of ingot/
    r"(?i)\b(told|heard|hears)\b": 7,  # StepRecord.told and layers/chosen_kernels.py have theirs
    r"\b(Told|Said|Heard|Ears)\b": 1,  # a turn "said" by a role
    r"(?i)\btwins?\b": 0,
    r"(?i)\bloud\b": 1,  # samples of a recording
    r"\b(Owns|Knows no|Knows nothing)\b": 0,
    r"(?i)\bof no one\b": 0,
    r"(?i)\bno finite number": 0,
    r"(?i)\bwhat (came|comes|has come) of it\b": 0,
}


def code() -> list[Path]:
    """The modules of the rooms that are done."""
    package = ROOT / "ingot"
    return [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in NOT_YET]


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


def test_rooms_that_are_not_done_exist() -> None:
    """One that is gone must not stay on the list."""
    assert [room for room in NOT_YET if not (ROOT / "ingot" / room).is_dir()] == []
