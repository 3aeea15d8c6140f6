"""Every flag that a page shows behind a verb is one that the verb takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from ingot.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "ingot").glob("**/README.md")),
]
SPAN = re.compile(r"`((?:\$ )?ingot [^`\n]+)`")
BLOCK_LINE = re.compile(r"^(?:    |\$ )?\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(ingot [^\n]*)", re.M)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def commands(text: str) -> Iterator[str]:
    """Commands of code spans and of lines; those that a backslash continues as one."""
    joined = re.sub(r"\\\n\s*", " ", text)
    yield from SPAN.findall(joined)
    for found in BLOCK_LINE.findall(re.sub(r"`[^`\n]*`", "", joined)):
        yield re.split(r"\s[|#>&;]|\s#", found)[0]


def unknown_flags(command: str, group: Any) -> list[str]:
    """Flags that the verb of a command does not take; [] where it names no verb."""
    words = command.removeprefix("$ ").split()[1:]
    verb = group
    while words and isinstance(getattr(verb, "commands", None), Mapping) and words[0] in verb.commands:
        verb = verb.commands[words.pop(0)]
    if verb is group:
        return []
    takes = {"--help"}.union(*({*one.opts, *one.secondary_opts} for one in verb.params))
    if getattr(verb, "commands", None):  # a verb of verbs, of which the text names none
        takes |= {flag for one in verb.commands.values() for p in one.params for flag in p.opts}
    return [flag for flag in FLAG.findall(" ".join(words)) if flag not in takes]


@pytest.fixture(scope="module")
def verbs() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_verbs_take_the_flags_that_pages_show(page: Path, verbs: Any) -> None:
    found = {one: unknown_flags(one, verbs) for one in commands(page.read_text(encoding="utf-8"))}
    assert {one: flags for one, flags in found.items() if flags} == {}


def test_what_is_seen(verbs: Any) -> None:
    text = 'Ask `ingot run E --chat "Hi"`:\n\n    ingot bench latency E \\\n        --nosuch | head --lines\n'
    assert list(commands(text)) == ['ingot run E --chat "Hi"', "ingot bench latency E  --nosuch"]
    assert [unknown_flags(one, verbs) for one in commands(text)] == [["--chat"], ["--nosuch"]]
    assert unknown_flags("ingot is a tool --with", verbs) == []
