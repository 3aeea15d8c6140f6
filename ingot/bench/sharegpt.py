"""Lengths of requests from conversations of people.

Owns the reading of ShareGPT-shaped JSON: a list of {"conversations": [{"from": "human", "value": "..."}, …]}.
The first human turn is a prompt; the answer after it says how many tokens are generated. Knows no engine.

    load = sharegpt_load(Path("sharegpt.json"), tokenizer.encode, count=200)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ingot.bench.load import Ask, Load
from ingot.errors import ConfigError

# The same filters as vLLM's serving benchmark, so that figures compare.
_LEAST_TOKENS = 4
_MOST_PROMPT = 1024
_MOST_TOTAL = 2048
_HUMANS = ("human", "user")

Encode = Callable[[str], Sequence[int]]


def sharegpt_load(path: Path, encode: Encode, count: int | None = None, longest: int | None = None) -> Load:
    """The lengths of the first ``count`` conversations that pass the filters (None: of all).

    Left out are conversations that do not begin with a human's turn and an answer; prompts and answers of
    less than 4 tokens; prompts of more than 1024 tokens; and those of more than 2048 together (or more than
    ``longest``, an engine's own limit).

    Raises:
        ConfigError: the file cannot be read, has another shape, or nothing of it passes.
    """
    turns = list(_first_turns(_read(path)))
    asks: list[Ask] = []
    for question, answer in turns:
        if count is not None and len(asks) == count:
            break
        ask = Ask(len(encode(question)), len(encode(answer)))
        if _passes(ask, _MOST_TOTAL if longest is None else min(_MOST_TOTAL, longest)):
            asks.append(ask)
    if not asks:
        raise ConfigError(
            "no conversation of the file can be used",
            seen=f"{path}: {len(turns)} begin with a human's turn and an answer",
            allowed=f"{_LEAST_TOKENS} to {_MOST_PROMPT} prompt tokens, {_MOST_TOTAL} with the answer",
            fix="--requests",
        )
    return Load(path.name, tuple(asks))


def _passes(ask: Ask, most_total: int) -> bool:
    prompt, new = ask.prompt_tokens, ask.new_tokens
    return min(prompt, new) >= _LEAST_TOKENS and prompt <= _MOST_PROMPT and prompt + new <= most_total


def _read(path: Path) -> list[Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("the requests cannot be read", seen=f"{path}: {error}", fix="--requests") from None
    if not isinstance(data, list):
        raise ConfigError(
            "the requests must be a list of conversations",
            seen=f"{path}: {type(data).__name__}",
            allowed='[{"conversations": [{"from": "human", "value": "..."}, ...]}, ...]',
            fix="--requests",
        )
    return data


def _first_turns(data: list[Any]) -> Iterator[tuple[str, str]]:
    """Question and answer of each conversation that begins with them."""
    for item in data:
        turns = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        first, second = turns[:2]
        if not (isinstance(first, dict) and isinstance(second, dict)) or first.get("from") not in _HUMANS:
            continue
        question, answer = first.get("value"), second.get("value")
        if isinstance(question, str) and isinstance(answer, str):
            yield question, answer
