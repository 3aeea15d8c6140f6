"""Lengths of requests from ShareGPT's JSON: a human turn is a prompt, its answer the tokens to generate."""

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

    Left out, and counted by reason, are conversations that do not begin with a human turn and an answer,
    turns under 4 tokens, prompts over 1024, and pairs over 2048 in total (or ``longest``, an engine's limit).

    Raises:
        ConfigError: the file cannot be read, has another shape, or nothing of it passes.
    """
    most = _MOST_TOTAL if longest is None else min(_MOST_TOTAL, longest)
    asks: list[Ask] = []
    left_out: Counter[str] = Counter()
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
    for item in data:
        if count is not None and len(asks) == count:
            break
        turns = item.get("conversations") if isinstance(item, dict) else None
        pair = [turn for turn in turns[:2] if isinstance(turn, dict)] if isinstance(turns, list) else []
        texts: list[Any] = [turn.get("value") for turn in pair]
        ask = None
        if len(pair) == 2 and pair[0].get("from") in _HUMANS and all(isinstance(t, str) for t in texts):
            ask = Ask(*(len(encode(text)) for text in texts))
        if ask is None:
            left_out["not starting with a human turn and an answer"] += 1
        elif min(ask.prompt_tokens, ask.new_tokens) < _LEAST_TOKENS:
            left_out[f"with a turn under {_LEAST_TOKENS} tokens"] += 1
        elif ask.prompt_tokens > _MOST_PROMPT:
            left_out[f"with a prompt over {_MOST_PROMPT} tokens"] += 1
        elif ask.prompt_tokens + ask.new_tokens > most:
            left_out[f"over {most} tokens in total"] += 1
        else:
            asks.append(ask)
    if not asks:
        raise ConfigError(
            "the file has no usable conversation",
            seen=", ".join([str(path), *(f"{n} {reason}" for reason, n in left_out.items())]),
            allowed=f"{_LEAST_TOKENS} to {_MOST_PROMPT} prompt tokens, {most} with the answer",
            field="requests",
        )
    return TokenLoad(path.name, tuple(asks), dict(left_out))
