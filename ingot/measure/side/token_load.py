"""Lengths of requests, and random prompts of these lengths.

Prompts are new at every call, so that no prefix is reused; speed does not depend on the values of their
tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import ConfigError

MIXED_SEED = 1
_WARM_UP_SEED = -1
_MOST, _LEAST = 1024, 4
_PROMPT_LOG, _OUTPUT_LOG = (4.6, 1.2), (5.0, 0.9)  # mean and deviation of the lengths' logarithms


@dataclass(frozen=True)
class Ask:
    """One request: tokens of its prompt, and tokens to generate (end tokens are ignored)."""

    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class TokenLoad:
    """Requests that arrive all at once; ``left_out`` counts those not taken, by reason."""

    name: str
    asks: tuple[Ask, ...]
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return sum(a.prompt_tokens for a in self.asks)

    @property
    def new_tokens(self) -> int:
        return sum(a.new_tokens for a in self.asks)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(a.prompt_tokens + a.new_tokens for a in self.asks)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "requests": len(self.asks),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "left_out": self.left_out,
            "lengths": [[a.prompt_tokens, a.new_tokens] for a in self.asks],
        }


def fixed(count: int, prompt_tokens: int, new_tokens: int) -> TokenLoad:
    """``count`` requests of the same lengths; ConfigError if a number is below 1."""
    check_counts(fixed=count, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    return TokenLoad(f"{count} of {prompt_tokens} + {new_tokens}", (Ask(prompt_tokens, new_tokens),) * count)


def mixed(count: int) -> TokenLoad:
    """Lengths like those of chats: lognormal, 4 to 1024 tokens each, from a fixed seed.

    256 requests have 47,539 prompt tokens and 53,807 new ones.
    """
    check_counts(mixed=count)
    rng = random.Random(MIXED_SEED)

    def length(log: tuple[float, float]) -> int:
        return max(_LEAST, min(_MOST, int(rng.lognormvariate(*log))))

    asks = tuple(Ask(length(_PROMPT_LOG), length(_OUTPUT_LOG)) for _ in range(count))
    return TokenLoad(f"mixed {count}", asks)


class PromptSource:
    """Random prompts, other ones at every call, the same in every run."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._ids = range(vocab_size)
        self._rng = random.Random(seed)

    def prompts(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._rng.choices(self._ids, k=a.prompt_tokens) for a in asks]


def warm_up_load(vocab_size: int, count: int, new_tokens: int) -> tuple[list[Ask], list[list[int]]]:
    """``count`` requests of one token each, with prompts that no measurement has."""
    asks = [Ask(1, new_tokens)] * count
    return asks, PromptSource(vocab_size, _WARM_UP_SEED).prompts(asks)


def parse_batches(text: str, field: str = "batch", what: str = "batch sizes") -> list[int]:
    """``"1,8,32"`` → [1, 8, 32], or a ConfigError that names ``field`` and ``what``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ConfigError(
            f"{what} must be positive integers separated by commas",
            seen=repr(text),
            allowed="for example 1,8,32",
            field=field,
        )
    return [int(part) for part in parts]


def check_counts(**counts: int) -> None:
    """Raise ConfigError if one is below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name.replace('_', '-')} must be at least 1", seen=value, field=name)
