"""Runs the calls of a client one by one: each is a function whose assertions say what must come back.

Owns their order, their names and the report. Uses the standard library alone, as every environment has it.

    python with_openai.py http://127.0.0.1:8000 pocket-tools    # {"chat": "ok", "errors": "…"} as JSON
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1], sys.argv[2]
BASE = f"{URL}/v1"
HELLO: list[Any] = [{"role": "user", "content": "How much is 27 + 58?"}]
ANSWER = "27 + 58 = 85"
TOO_LONG: list[Any] = [{"role": "user", "content": "a b " * 3000}]
_CALLS: dict[str, Callable[[], Any]] = {}


def call(function: Callable[[], Any]) -> Callable[[], Any]:
    """One of the calls, by the function's name."""
    _CALLS[function.__name__] = function
    return function


def kind_of_error(function: Callable[[], Any]) -> str:
    """The class of what a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return "none"


def main() -> None:
    """Run all, and print what came of each as the last line."""
    found = {}
    for name, function in _CALLS.items():
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
            found[name] = "ok"
        except Exception as error:
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(found))
