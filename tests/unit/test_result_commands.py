"""Every file in docs/results has the command that measures it, and the command exists. Nothing runs."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.figures import PAGES
from benchmarks.result_values import RESULTS
from ingot.cli.main import app

ROOT = RESULTS.parents[1]
FILES = sorted(RESULTS.rglob("*.json"))
OTHERS = {"awk", "nvidia-smi"}  # programs of others that a command may begin with
NOT_HERE = {"ray", "vllm"}  # what a benchmark may import and a developer's environment need not have
# A script's command on a line of its own, or within backticks.
_SHOWN = re.compile(
    r"^ *(python (?:benchmarks/|-m recipes\.)[^\n#]*)|`(python (?:benchmarks/|-m recipes\.)[^`]*)`", re.M
)
_TAKES = """
import argparse, json, runpy, sys

class Taken(Exception):
    pass

def parse(self, *given):
    plain(self, *given)
    raise Taken

plain, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, parse
for line in sys.stdin:
    words = json.loads(line)
    sys.argv, run = words[1:], runpy.run_path
    if words[1] == "-m":
        sys.argv, run = words[2:], runpy.run_module
    else:
        sys.path.insert(0, words[1].rpartition("/")[0])
    try:
        run(sys.argv[0], run_name="__main__")
        print("RAN", line.strip())
    except Taken:
        print("TAKEN")
    except ModuleNotFoundError as error:
        print("MISSING", error.name)
    except SystemExit:
        print("REFUSED", line.strip())
"""


def commands(value: Any) -> Iterator[list[str]]:
    """The words of every command that a file's JSON holds under ``command`` and ``commands``."""
    if isinstance(value, list):
        for one in value:
            yield from commands(one)
    for key, one in value.items() if isinstance(value, dict) else ():
        if key in ("command", "commands"):
            for line in [one] if isinstance(one, str) else one:
                yield from _apart(shlex.split(line))
        else:
            yield from commands(one)


def _apart(words: list[str]) -> Iterator[list[str]]:
    """The commands of a line, which semicolons end; without the cores that they are bound to."""
    command: list[str] = []
    for word in [*words[:-1], f"{words[-1]};"]:
        command.append(word.removesuffix(";"))
        if word.endswith(";"):
            yield command[3:] if command[:2] == ["taskset", "-c"] else command
            command = []


def refusal(words: list[str]) -> str | None:
    """Why a command cannot be given on this commit; None: it can."""
    if words[0] == "ingot":
        return _verb_refuses(words[1:])
    if words[0] != "python":
        return None if words[0] in OTHERS else f"no such program: {words[0]}"
    module = words[1] == "-m"
    script = Path(*words[2].split(".")).with_suffix(".py") if module else Path(words[1])
    if not (ROOT / script).is_file():
        return f"no such script: {script}"
    given = {word.partition("=")[0] for word in words[2:] if re.match(r"--[a-z]", word)}
    named = [word for word in words if word.startswith("benchmarks/") and "SHAPE" not in word]
    missing = [word for word in named if not (ROOT / word).exists()]
    unknown = sorted(given - options(ROOT / script)) + missing
    return f"{script} does not know {', '.join(unknown)}" if unknown else None


@functools.cache
def _ingot() -> Any:
    return typer.main.get_command(app)


def _verb_refuses(words: list[str]) -> str | None:
    verb = _ingot()
    while hasattr(verb, "commands"):
        if words[0] not in verb.commands:
            return f"no such verb: {words[0]}"
        verb, words = verb.commands[words[0]], words[1:]
    try:
        verb.make_context("ingot", list(words))
    except Exception as error:  # of the click that typer brings
        return repr(error)
    return None


@functools.cache
def options(script: Path) -> set[str]:
    """The options that a script's parser has, by its source and that of scripts beside it that it imports:
    names in ``add_argument``, and fields of dataclasses where it adds one per field.
    """
    found: set[str] = set()
    fields: set[str] = set()
    scripts = [script]
    for one in scripts:
        for node in ast.walk(ast.parse(one.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                found |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
                found |= {"per field" for arg in node.args if isinstance(arg, ast.JoinedStr)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields.add("--" + node.target.id.replace("_", "-"))
            elif isinstance(node, ast.ImportFrom) and node.module:
                beside = script.parent / f"{node.module.rpartition('.')[2]}.py"
                scripts += [beside] if beside.is_file() and beside not in scripts else []
    return found | fields if "per field" in found else found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(RESULTS)))
def test_a_file_has_a_command_that_can_be_given(file: Path) -> None:
    value = json.loads(file.read_text(encoding="utf-8"))
    found = list(commands(value))
    assert found or "source" in value, "no `command` that measures it, and no `source` that published it"
    assert [why for words in found if (why := refusal(words)) is not None] == []


def test_commands_on_pages_and_in_scripts_can_be_given() -> None:
    pages = [*PAGES, *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages]
    found = {line for text in texts for pair in _SHOWN.findall(text) for line in pair if line}
    assert len(found) > 150
    wrong = [refusal(words) for line in sorted(found) for words in _apart(shlex.split(line))]
    assert [why for why in wrong if why is not None] == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python benchmarks/gone.py --json FILE", "no such script"),
        ("python -m recipes.gone --out run", "no such script"),
        ("python benchmarks/norms.py --jsn FILE", "does not know --jsn"),
        (
            "python benchmarks/beside_vllm.py ingot benchmarks/shapes/gone.json --json FILE",
            "shapes/gone.json",
        ),
        ("ingot bench latancy engines/pocket-chat", "no such verb: latancy"),
        ("ingot bench latency models/pocket-chat --json FILE", "unexpected extra argument"),
        ("a job of its own on an H200", "no such program: a"),
    ],
)
def test_what_cannot_be_given(command: str, why: str) -> None:
    (words,) = commands([{"command": command}])
    assert why in str(refusal(words))


def test_where_commands_are_found() -> None:
    value = {"a": [{"command": "taskset -c 0-3 python x.py --a 'b; c'; ingot run"}], "commands": ["awk 1"]}
    assert list(commands(value)) == [["python", "x.py", "--a", "b; c"], ["ingot", "run"], ["awk", "1"]]


@pytest.mark.slow
def test_scripts_take_their_words() -> None:
    """As their parsers judge, in one process: values too, and what must be given."""
    every = {tuple(words): None for file in FILES for words in commands(json.loads(file.read_text("utf-8")))}
    ours = [
        words for words in every if words[0] == "python" and not words[1].startswith("benchmarks/reference/")
    ]
    process = subprocess.run(
        [sys.executable, "-c", _TAKES],
        input="\n".join(map(json.dumps, ours)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    answers = process.stdout.splitlines()
    assert len(answers) == len(ours), process.stderr
    missing = {f"MISSING {name}" for name in NOT_HERE}
    assert [line for line in answers if line != "TAKEN" and line not in missing] == [], process.stderr
