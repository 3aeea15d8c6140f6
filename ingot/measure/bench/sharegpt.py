"""Loads from files of requests: a human turn is a prompt, its answer the tokens to generate."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError
from ingot.measure.bench.request_file import (
    SHAPES,
    Count,
    Encode,
    gives_lengths,
    read_requests,
    records_of,
    request_of,
)
from ingot.measure.side.token_load import Ask, TokenLoad, check_counts

# The same filters as vLLM's serving benchmark, so that figures compare.
_LEAST_TOKENS = 4
_MOST_PROMPT = 1024
_MOST_TOTAL = 2048
_NO_PAIR = "not starting with a human turn and an answer"
_CHARACTERS = 4  # of English text, per token


@dataclass(frozen=True)
class RequestLimits(JsonConfig):
    """Which requests of a file are taken.

    Attributes:
        max_prompt: tokens of a prompt; longer ones are left out.
        max_new: tokens of an answer; longer ones are cut.
        sample: how many requests, in an order drawn with ``seed``; all where there are fewer.

    Raises:
        ConfigError: a number is below 1, the seed below 0.
    """

    max_prompt: int = 1024
    max_new: int = 1024
    sample: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(max_prompt=self.max_prompt, max_new=self.max_new, sample=self.sample)
        if self.seed < 0:
            raise ConfigError("the seed must not be negative", seen=self.seed, field="seed")


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
    for item in records_of(path, read_requests(path)):
        if count is not None and len(asks) == count:
            break
        ask = request_of(item, lambda text: len(encode(text)))
        why = _refused(item, ask, _MOST_PROMPT)
        if why is None and ask is not None and ask.prompt_tokens + ask.new_tokens > most:
            why = f"over {most} tokens in total"
        if why is not None or ask is None:
            left_out[why or _NO_PAIR] += 1
        else:
            asks.append(ask)
    if not asks:
        allowed = f"{_LEAST_TOKENS} to {_MOST_PROMPT} prompt tokens, {most} with the answer"
        raise _nothing(path, left_out, allowed, ("requests",), None)
    return TokenLoad(path.name, tuple(asks), dict(left_out))


def limited_load(path: Path, raw: bytes, count: Count, limits: RequestLimits) -> tuple[TokenLoad, int]:
    """The lengths of requests within ``limits``, in the order drawn, and how many of their answers were cut.

    ``left_out`` counts, by reason, the records that were drawn and not taken.

    Args:
        raw: the bytes of the file.

    Raises:
        ConfigError: the file has another shape, or nothing of it is within the limits.
    """
    records = records_of(path, raw)
    random.Random(limits.seed).shuffle(records)
    asks: list[Ask] = []
    left_out: Counter[str] = Counter()
    cut, too_long = 0, False
    for record in records:
        if len(asks) == limits.sample:
            break
        ask = request_of(record, count)
        why = _refused(record, ask, limits.max_prompt)
        if why is not None or ask is None:
            left_out[why or _NO_PAIR] += 1
            too_long |= ask is not None and ask.prompt_tokens > limits.max_prompt
            continue
        cut += ask.new_tokens > limits.max_new
        asks.append(Ask(ask.prompt_tokens, min(ask.new_tokens, limits.max_new)))
    if not asks:
        allowed = f"prompts of at most {limits.max_prompt} tokens"
        fix = "a larger `max_prompt`" if too_long else f"a file of {SHAPES}"
        raise _nothing(path, left_out, allowed, ("requests", "max_prompt"), fix)
    return TokenLoad(path.name, tuple(asks), dict(left_out)), cut


def by_characters(text: str) -> int:
    """Tokens of a text where there is no tokenizer: one for every four characters, at least one."""
    return max(1, -(-len(text) // _CHARACTERS))


def _refused(record: Any, ask: Ask | None, max_prompt: int) -> str | None:
    """Why a request is left out; None if it is not. Lengths that a record gives may be under 4 tokens."""
    if ask is None:
        return "without lengths of at least 1" if gives_lengths(record) else _NO_PAIR
    if not gives_lengths(record) and min(ask.prompt_tokens, ask.new_tokens) < _LEAST_TOKENS:
        return f"with a turn under {_LEAST_TOKENS} tokens"
    if ask.prompt_tokens > max_prompt:
        return f"with a prompt over {max_prompt} tokens"
    return None


def _nothing(
    path: Path, left_out: Counter[str], allowed: str, fields: tuple[str, ...], fix: str | None
) -> ConfigError:
    reasons = (f"{n} {reason}" for reason, n in left_out.items())
    return ConfigError(
        "the file has no usable conversation",
        seen=", ".join([str(path), *reasons]),
        allowed=allowed,
        field=fields,
        fix=fix,
    )
