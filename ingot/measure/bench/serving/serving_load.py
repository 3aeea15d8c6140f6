"""The load on a server: prompts, and when they are sent."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any, Protocol

from ingot.config.files.json_text import JsonError, parse_json, read_text
from ingot.errors import ConfigError
from ingot.measure.bench.serving.server_target import ServerPrompt
from ingot.measure.side.token_load import Ask, PromptSource, mixed, parse_batches

VOCABULARY = 1000  # any model has as many ids
# Each is one token in most vocabularies of English, with the space before it.
_TEXT = (
    "about after again air also answer around ask away back before big book boy bring call car change child "
    "city close come country day different earth end every eye face far father feel find first follow food "
    "form friend girl give good great group grow hand hard head hear help high home house idea keep kind "
    "know land large last learn leave left letter life light line list little live long look man mean move "
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Point:
    """Requests arrive at ``rate`` per second (inf: all at once), or ``concurrency`` are kept in flight."""

    rate: float | None = None
    concurrency: int | None = None

    @property
    def name(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "all at once" if self.rate == math.inf else f"{self.rate:g}/s"

    def to_json(self) -> dict[str, Any]:
        rate = "inf" if self.rate == math.inf else self.rate
        return {"load": self.name, "rate": rate, "concurrency": self.concurrency}


def parse_rates(text: str) -> list[Point]:
    """A point per rate in ``"0.5,4,inf"``."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        allowed = "requests per second, above 0 or inf, separated by commas"
        raise ConfigError("not a list of rates", seen=repr(text), allowed=allowed, field="rate")
    return [Point(rate=rate) for rate in rates]


def parse_concurrencies(text: str) -> list[Point]:
    """A point per number in ``"1,8,64"``."""
    return [Point(concurrency=n) for n in parse_batches(text, "concurrency", "concurrencies")]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests are sent: a Poisson process whose last request comes at ``count / rate``, as
    in ``vllm bench serve``; all 0 for an infinite rate.
    """
    if rate == math.inf:
        return [0.0] * count
    rng = random.Random(seed)
    times = list(accumulate(rng.expovariate(1.0) for _ in range(count)))
    return [time * count / rate / times[-1] for time in times]


class Prompts(Protocol):
    """A source of prompts, new ones at every call; ``count``: how many there are, None if endless."""

    count: int | None

    def take(self, count: int) -> list[ServerPrompt]: ...

    def to_json(self) -> dict[str, Any]: ...


class RandomPrompts:
    """Random token ids for completions, words for a chat; new in every process, so that no prefix cache has
    them.

    Args:
        shape: tokens of each prompt and answer; None: the lengths of ``mixed``.
        shared_prefix: tokens that all prompts begin with, beside their own.
        vocab_size: ids are below it.
        seed: of ids and words; None: a new one.
    """

    def __init__(
        self,
        shape: Ask | None,
        *,
        chat: bool,
        shared_prefix: int = 0,
        vocab_size: int = VOCABULARY,
        seed: int | None = None,
    ) -> None:
        self.count: int | None = None
        self._shape, self._chat = shape, chat
        self._vocab_size = len(_WORDS) if chat else vocab_size
        self._seed = secrets.randbits(48) if seed is None else seed
        self._source = PromptSource(self._vocab_size, self._seed)
        (self._prefix,) = self._source.prompts([Ask(shared_prefix, 1)])

    def take(self, count: int) -> list[ServerPrompt]:
        asks: Sequence[Ask] = mixed(count).asks if self._shape is None else (self._shape,) * count
        return [
            ServerPrompt(self._content([*self._prefix, *ids]), ask.new_tokens)
            for ask, ids in zip(asks, self._source.prompts(asks), strict=True)
        ]

    def _content(self, ids: list[int]) -> str | list[int]:
        return " ".join(_WORDS[i] for i in ids) if self._chat else ids

    def to_json(self) -> dict[str, Any]:
        shape = self._shape
        lengths = {"lengths": "mixed"} if shape is None else vars(shape)
        return {
            "prompts": "random words" if self._chat else "random token ids",
            **lengths,
            "shared_prefix": len(self._prefix),
            "vocab_size": self._vocab_size,
            "seed": self._seed,
        }


class FilePrompts:
    """The lines of a .jsonl file, over and over.

    A line is an object with ``prompt``, ``messages`` or ``prompt_token_ids``, and optionally
    ``output_tokens`` in place of ``new_tokens``.

    Raises:
        ConfigError: the file cannot be read, or a line is none of these.
    """

    def __init__(self, path: Path, new_tokens: int) -> None:
        try:
            lines = read_text(path).split("\n")
        except (OSError, ValueError) as error:
            raise ConfigError("the data cannot be read", seen=f"{path}: {error}", field="dataset") from None
        self._path = path
        prompts = [
            _prompt(line, f"{path}, line {number}", new_tokens)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
        if not prompts:
            raise ConfigError("no prompts", seen=f"{path} is empty", field="dataset")
        self.count: int | None = len(prompts)
        self._next = cycle(prompts)

    def take(self, count: int) -> list[ServerPrompt]:
        return list(islice(self._next, count))

    def to_json(self) -> dict[str, Any]:
        return {"prompts": str(self._path), "count": self.count}


_KEYS = {"prompt": str, "messages": list, "prompt_token_ids": list}


def _prompt(line: str, where: str, new_tokens: int) -> ServerPrompt:
    try:
        value = parse_json(line)
    except JsonError:
        value = None
    value = value if isinstance(value, dict) else {}
    found = [value[key] for key, kind in _KEYS.items() if isinstance(value.get(key), kind) and value[key]]
    wanted = value.get("output_tokens", new_tokens)
    if len(found) != 1 or not isinstance(wanted, int) or wanted < 1:
        raise ConfigError(
            f"{where} is not a prompt",
            seen=line[:80],
            allowed='{"prompt": "…"}, {"messages": […]} or {"prompt_token_ids": […]}; "output_tokens": N',
            field="dataset",
        )
    return ServerPrompt(found[0], wanted)
