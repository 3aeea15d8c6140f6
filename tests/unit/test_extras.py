"""Extras of pyproject.toml: ``all`` has every other, pages and errors name those that are there."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.figures import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[Requirement]] = {
    name: [Requirement(text) for text in texts] for name, texts in PROJECT["optional-dependencies"].items()
}
COMMAND = re.compile(r"(?:'\.|-e \.|/ingot)\[([\w,-]+)\]")  # pip install '.[serve,speech]'
CALL = re.compile(r"to_install\(['\"]([\w,-]+)['\"]\)")


def brought(extra: str) -> set[str]:
    """Names of the libraries that an extra installs, those of the extras it names included."""
    found: set[str] = set()
    for one in EXTRAS[extra]:
        found |= set().union(*map(brought, one.extras)) if one.name == "ingot" else {one.name}
    return found


def test_all_names_every_other_extra() -> None:
    (everything,) = EXTRAS["all"]
    assert everything.name == "ingot"
    assert everything.extras == EXTRAS.keys() - {"all", "dev"}


def test_the_page_brings_the_server() -> None:
    assert brought("serve") < brought("web")
    assert brought("serve") < brought("ray")


def test_constraints_pin_everything_that_all_brings() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines)}
    wanted = [one for texts in EXTRAS.values() for one in texts if one.name != "ingot"]
    wanted += map(Requirement, PROJECT["dependencies"])
    assert [str(one) for one in wanted if canonicalize_name(one.name) not in pins] == []
    assert [str(one) for one in wanted if pins[canonicalize_name(one.name)] not in one.specifier] == []


@pytest.mark.parametrize(("folder", "ending", "pattern"), [("", "md", COMMAND), ("ingot", "py", CALL)])
def test_extras_that_pages_and_errors_name_are_there(folder: str, ending: str, pattern: re.Pattern) -> None:
    places = [ROOT / folder] if folder else [ROOT / "docs", ROOT / "ingot", ROOT / "tests"]
    files = [file for place in places for file in place.rglob(f"*.{ending}")]
    files += [ROOT / "README.md", ROOT / "Dockerfile", ROOT / "Makefile"] if not folder else []
    named = {
        extra
        for file in files
        for words in pattern.findall(file.read_text(encoding="utf-8"))
        for extra in words.split(",")
    }
    assert len(named) >= 6
    assert named - EXTRAS.keys() == set()
