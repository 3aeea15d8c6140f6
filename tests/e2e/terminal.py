"""Verbs of ``ingot`` run within a test.

result = ingot("run", engine, "hello", "--device", "cpu")
"""

from __future__ import annotations

import functools
import json
from typing import Any

import typer.testing

from ingot.cli.main import app

# Typer makes the parsers of all verbs anew for each call, which takes longer than many a verb.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def ingot(*words: object, stdin: str | bytes | None = None) -> Any:
    """Run a verb; what it lets through other than an exit fails the test."""
    result = typer.testing.CliRunner().invoke(app, [str(w) for w in words], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*words: object, stdin: str | None = None) -> list[dict[str, Any]]:
    result = ingot("run", *words, "--device", "cpu", "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
