"""Every command of docs/published.md, on published weights: `make network-test`, where there is a hub.

What `# →` names must be in a command's output. The tests without that mark hold the page to its form, so that
the others run what it shows, and check the commands of docs/evaluation.md.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ingot.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "published.md"
EVALUATION = PAGE.with_name("evaluation.md")
SECTION = re.compile(r"^## (.+)\n((?:(?!^## ).*\n?)*)", re.M)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
MODELS = {  # name of a test → heading
    "gpt2": "GPT-2 medium",
    "qwen": "Qwen-7B-Chat",
    "qwen14": "Qwen-14B",
    "vicuna": "LLaMA and Vicuna 7B",
    "minigpt4": "MiniGPT-4 7B",
    "whisper": "Whisper",
    "english": "Whisper, English",
}
IDS = (  # of the five projects
    *("openai-community/gpt2-medium", "Qwen/Qwen-7B-Chat", "Qwen/Qwen-14B", "huggyllama/llama-7b"),
    *(f"openai/whisper-{size}" for size in ("tiny", "base", "small", "medium")),
)
REPORTED = {"tiny": 5.61, "base": 4.25, "small": 3.05, "medium": 3.01}  # WER on test-clean
DATA = ("hf:abisee/cnn_dailymail:3.0.0:test", "hf:openslr/librispeech_asr:clean:test")
FILES = (
    "eva_vit_g.pth",
    "blip2_pretrained_flant5xxl.pth",
    "pretrained_minigpt4_7b.pth",
    "vicuna-7b",
    "pictures",
)


EXPECTED = "# → "


@dataclass(frozen=True)
class Command:
    """Its words, and what its output must contain."""

    words: list[str]
    expected: str = ""

    @classmethod
    def of(cls, line: str) -> Command:
        command, _, expected = line.partition(EXPECTED)
        return cls(shlex.split(command), expected.strip())

    def run(self, program: Sequence[str] = (sys.executable, "-m")) -> None:
        """Show the output as it comes; fail on an exit code other than 0, or where the text is not in it."""
        shown = []
        pipe = subprocess.PIPE
        with subprocess.Popen([*program, *self.words], stdout=pipe, text=True, encoding="utf-8") as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="")
                shown.append(line)
        assert process.returncode == 0, shlex.join(self.words)
        assert self.expected in "".join(shown), f"{shlex.join(self.words)}: {''.join(shown)[-2000:]}"


def commands(page: str) -> dict[str, list[Command]]:
    """Heading → the commands in its blocks."""
    return {
        heading: [Command.of(line) for block in BLOCK.findall(text) for line in block.splitlines() if line]
        for heading, text in SECTION.findall(page)
    }


def page_commands() -> dict[str, list[Command]]:
    return commands(PAGE.read_text(encoding="utf-8"))


def test_every_section_has_commands_and_a_test() -> None:
    found = page_commands()
    assert list(found) == list(MODELS.values())
    assert all(len(lines) >= 3 and {one.words[0] for one in lines} == {"ingot"} for lines in found.values())


def test_the_models_and_data_sets_of_the_five_projects_are_there() -> None:
    words = [word for lines in page_commands().values() for one in lines for word in one.words]
    assert [name for name in (*IDS, *DATA) if name not in words] == []
    assert "lmsys/vicuna-7b-delta-v0" in words


def test_expectations_that_have_a_source() -> None:
    """Each is bounded: no stricter than what was reported in 2023, no looser than half a point."""
    found = page_commands()
    (born,) = (one for one in found["GPT-2 medium"] if one.expected)
    assert born.words[3] == "Born in north-east France, Soyer trained as a"
    assert born.expected == "chef before moving to London in the early"
    (summaries,) = (one.words for one in found["GPT-2 medium"] if "summarize" in one.words)
    assert summaries[summaries.index("--min") + 1] == "rouge1=14"
    bounds = {}
    for one in found["Whisper, English"]:
        if "--max" in one.words:
            assert "--limit" not in one.words  # the reported figures are of the whole set
            size = one.words[3].removeprefix("engines/whisper-").removesuffix(".en")
            bounds[size] = float(one.words[one.words.index("--max") + 1].removeprefix("wer="))
    assert list(bounds) == list(REPORTED)
    assert all(0 <= bounds[size] - wer <= 0.5 for size, wer in REPORTED.items())


def test_a_command_is_judged_by_its_code_and_its_output() -> None:
    python = (sys.executable, "-c")
    Command(["print('你好！')"], "你好").run(python)
    Command(["pass"]).run(python)
    with pytest.raises(AssertionError):
        Command(["print('no')"], "你好").run(python)
    with pytest.raises(AssertionError):
        Command(["raise SystemExit(1)"]).run(python)


def test_commands_of_a_page_are_split_as_a_shell_does() -> None:
    one, two = 'ingot run a "b c"   # → d e\n', "ingot verify e\n\ningot x\n"
    page = f"x\n## One\n\n```sh\n{one}```\n\n## Two\n\n```sh\n{two}```\n"
    assert commands(page) == {
        "One": [Command(["ingot", "run", "a", "b c"], "d e")],
        "Two": [Command(["ingot", "verify", "e"]), Command(["ingot", "x"])],
    }


@functools.cache
def verbs() -> Any:
    return typer.main.get_command(app)


def refusal(words: list[str]) -> str | None:
    """Why the command line does not take the words after ``ingot``; None if it does."""
    verb = verbs()
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
    found = [one.words for lines in page_commands().values() for one in lines]
    text = EVALUATION.read_text(encoding="utf-8").replace("\\\n", "")
    shown = [shlex.split(line) for line in re.findall(r"^    (ingot eval .+)$", text, re.M)]
    assert len(shown) >= 8
    refused = {shlex.join(words): refusal(words[1:]) for words in (*found, *shown)}
    assert {words: why for words, why in refused.items() if why} == {}
    assert refusal(["eval", "summarize", "e", "--data", "d", "--no-such"]) is not None
    assert refusal(["no-such"]) is not None


@pytest.mark.network
@pytest.mark.timeout(0)
@pytest.mark.parametrize("model", MODELS)
def test_published(model: str) -> None:
    missing = [name for name in FILES if not Path(name).exists()]
    if model == "minigpt4" and missing:
        pytest.skip(f"not in this folder: {', '.join(missing)}")
    for command in page_commands()[MODELS[model]]:
        command.run()
