"""Lengths of requests from conversations of people.

Owns the reading of ShareGPT-shaped JSON: a list of {"conversations": [{"from": "human", "value": "..."}, …]}.
The first human turn is a prompt; the answer after it says how many tokens are generated. Knows no engine.

    load = sharegpt_load(Path("sharegpt.json"), tokenizer.encode, count=200)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ingot.config.files.json_text import JsonError, parse_json
from ingot.errors import ConfigError
from ingot.measure.side.token_load import Ask, TokenLoad

# The same filters as vLLM's serving benchmark, so that figures compare.
_LEAST_TOKENS = 4
_MOST_PROMPT = 1024
_MOST_TOTAL = 2048
_HUMANS = ("human", "user")

Encode = Callable[[str], Sequence[int]]


def sharegpt_load(
    path: Path, encode: Encode, count: int | None = None, longest: int | None = None
) -> TokenLoad:
    """The lengths of the first ``count`` conversations that pass the filters (None: of all).

    Left out are conversations that do not begin with a human's turn and an answer; prompts and answers of
    less than 4 tokens; prompts of more than 1024 tokens; and those of more than 2048 together (or more than
    ``longest``, an engine's own limit). The load counts those read, by reason.

    Raises:
        ConfigError: the file cannot be read, has another shape, or nothing of it passes.
    """
    most = _MOST_TOTAL if longest is None else min(_MOST_TOTAL, longest)
    asks: list[Ask] = []
    left_out: Counter[str] = Counter()
    for item in _read(path):
        if count is not None and len(asks) == count:
            break
        found = _ask_or_reason(item, encode, most)
        if isinstance(found, Ask):
            asks.append(found)
        else:
            left_out[found] += 1
    if not asks:
        raise ConfigError(
            "the file has no usable conversation",
            seen=", ".join([str(path), *(f"{n} {reason}" for reason, n in left_out.items())]),
            allowed=f"{_LEAST_TOKENS} to {_MOST_PROMPT} prompt tokens, {most} with the answer",
            field="requests",
        )
    return TokenLoad(path.name, tuple(asks), dict(left_out))


def _ask_or_reason(item: object, encode: Encode, most: int) -> Ask | str:
    turns = _first_turns(item)
    if turns is None:
        return "not starting with a human turn and an answer"
    ask = Ask(*(len(encode(text)) for text in turns))
    if min(ask.prompt_tokens, ask.new_tokens) < _LEAST_TOKENS:
        return f"with a turn under {_LEAST_TOKENS} tokens"
    if ask.prompt_tokens > _MOST_PROMPT:
        return f"with a prompt over {_MOST_PROMPT} tokens"
    return ask if ask.prompt_tokens + ask.new_tokens <= most else f"over {most} tokens in total"


def _read(path: Path) -> list[Any]:
    try:
        data = parse_json(path.read_bytes())
    except (OSError, JsonError) as error:
        raise ConfigError("the requests cannot be read", seen=f"{path}: {error}", field="requests") from None
    if not isinstance(data, list):
        raise ConfigError(
            "the requests must be a list of conversations",
            seen=f"{path}: {type(data).__name__}",
            allowed='[{"conversations": [{"from": "human", "value": "..."}, ...]}, ...]',
            field="requests",
        )
    return data


def _first_turns(item: object) -> tuple[str, str] | None:
    """Question and answer of a conversation that begins with them."""
    turns = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    first, second = turns[:2]
    if not (isinstance(first, dict) and isinstance(second, dict)) or first.get("from") not in _HUMANS:
        return None
    question, answer = first.get("value"), second.get("value")
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None
