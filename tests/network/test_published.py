"""Every command of docs/published.md, on published weights: `make network-test`, where there is a hub.

The tests without that mark hold the page to its form, so that the others run what it shows.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ingot.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "published.md"
SECTION = re.compile(r"^## (.+)\n((?:(?!^## ).*\n?)*)", re.M)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
MODELS = {  # name of a test → heading
    "gpt2": "GPT-2 medium",
    "qwen": "Qwen-7B-Chat",
    "vicuna": "LLaMA and Vicuna 7B",
    "minigpt4": "MiniGPT-4 7B",
    "whisper": "Whisper",
}
FILES = (
    "eva_vit_g.pth",
    "blip2_pretrained_flant5xxl.pth",
    "pretrained_minigpt4_7b.pth",
    "vicuna-7b",
    "pictures",
)


def commands(page: str) -> dict[str, list[list[str]]]:
    """Heading → the words of each command in its blocks."""
    return {
        heading: [shlex.split(line) for block in BLOCK.findall(text) for line in block.splitlines() if line]
        for heading, text in SECTION.findall(page)
    }


def test_every_section_has_commands_and_a_test() -> None:
    found = commands(PAGE.read_text(encoding="utf-8"))
    assert list(found) == list(MODELS.values())
    assert all(len(lines) >= 3 and {line[0] for line in lines} == {"ingot"} for lines in found.values())


def test_commands_of_a_page_are_split_as_a_shell_does() -> None:
    page = 'x\n## One\n\n```sh\ningot run a "b c"\n```\n\n## Two\n\n```sh\ningot verify e\n\ningot x\n```\n'
    assert commands(page) == {
        "One": [["ingot", "run", "a", "b c"]],
        "Two": [["ingot", "verify", "e"], ["ingot", "x"]],
    }


def refusal(words: list[str]) -> str | None:
    """Why the command line does not take the words after ``ingot``; None if it does."""
    verb: Any = typer.main.get_command(app)
    while hasattr(verb, "commands"):
        name, *words = words
        if name not in verb.commands:
            return f"no such verb: {name}"
        verb = verb.commands[name]
    try:
        verb.make_context("ingot", words)
    except Exception as error:  # of the click that typer brings
        return repr(error)
    return None


def test_this_version_takes_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:  # the command line checks that they are there
        Path(name).touch() if "." in name else Path(name).mkdir()
    found = commands(PAGE.read_text(encoding="utf-8"))
    refused = {shlex.join(w): refusal(w[1:]) for lines in found.values() for w in lines if refusal(w[1:])}
    assert refused == {}
    assert refusal(["eval", "summarize", "e", "--data", "d", "--no-such"]) is not None
    assert refusal(["no-such"]) is not None


@pytest.mark.network
@pytest.mark.timeout(0)
@pytest.mark.parametrize("model", MODELS)
def test_published(model: str) -> None:
    missing = [name for name in FILES if not Path(name).exists()]
    if model == "minigpt4" and missing:
        pytest.skip(f"not in this folder: {', '.join(missing)}")
    for words in commands(PAGE.read_text(encoding="utf-8"))[MODELS[model]]:
        result = subprocess.run([sys.executable, "-m", *words], check=False)
        assert result.returncode == 0, shlex.join(words)
