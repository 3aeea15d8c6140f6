"""docs/caught.md: every command passes without its bug, finds it, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.caught.__main__ import Folders, Printed, is_found, passes, run
from benchmarks.caught.bugs import BUGS, Bug
from tests.e2e.folders import ROOT

PAGE = ROOT / "docs" / "caught.md"
SLOW = ("gate-up", "rotated", "timestamps")
NAMES = [bug.name for bug in BUGS]
CASES = [pytest.param(bug, id=bug.name, marks=pytest.mark.slow if bug.name in SLOW else ()) for bug in BUGS]
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


class Commands:
    """Runs commands; what a sound engine prints is kept, for bugs that share it."""

    def __init__(self, root: Path) -> None:
        self._folders = Folders(root)
        self._sound: dict[tuple[object, str], Printed] = {}

    def sound(self, bug: Bug) -> Printed:
        key = (bug.prepare, bug.command)
        if key not in self._sound:
            self._sound[key] = run(bug, self._folders, planted=False)
        return self._sound[key]

    def planted(self, bug: Bug) -> Printed:
        return run(bug, self._folders, planted=True)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("caught"))


def shown() -> list[tuple[str, list[str]]]:
    """The page's commands and the lines that they print."""
    blocks = re.findall(r"^```console\n\$ (.+)\n((?:.+\n)+?)```$", PAGE.read_text(encoding="utf-8"), re.M)
    return [(command, lines.splitlines()) for command, lines in blocks]


def plain(line: str) -> str:
    """A line without its figures, which differ from machine to machine."""
    return " ".join(NUMBER.sub("#", line).split())


def stands_in(line: str, printed: list[str]) -> bool:
    """Whether a line of the page is printed; ``…`` is any text, at the end, too."""
    parts = [re.escape(part.strip()) for part in plain(line).split("…")]
    return any(re.match(r".*?".join(parts), plain(one)) for one in printed)


@pytest.mark.parametrize("bug", CASES)
def test_a_bug_is_found_and_a_sound_engine_passes(bug: Bug, commands: Commands) -> None:
    sound, planted = commands.sound(bug), commands.planted(bug)
    assert passes(bug, sound), sound.text
    assert is_found(bug, planted), planted.text
    command, lines = shown()[NAMES.index(bug.name)]
    assert command == bug.command
    printed = planted.text.splitlines()
    assert [line for line in lines if not stands_in(line, printed)] == []


def test_the_page_has_every_bug_once() -> None:
    assert [command for command, _ in shown()] == [bug.command for bug in BUGS]
    rows = re.findall(r"^\| \[([\w-]+)\]", PAGE.read_text(encoding="utf-8"), re.M)
    assert rows == NAMES
    assert len(BUGS) == 10


def test_a_line_that_is_not_printed_is_seen() -> None:
    printed = ["  step      layers.0.mlp is off by 4e+05 times", "failed engine on AMD EPYC in fp32, 0.5 s"]
    assert stands_in("  step  layers.1.mlp is off by 3 times", printed)
    assert stands_in("failed engine on … in fp32", printed)
    assert not stands_in("  step  layers.0.mlp is within 4e+05 times", printed)
    assert not stands_in("proven engine on … in fp32", printed)
