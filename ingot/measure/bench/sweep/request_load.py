"""The load of a sweep from a file of requests: the same requests for every side, precision and batch size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError, IngotError
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.bench.latency import METHOD
from ingot.measure.bench.request_file import Count, read_requests
from ingot.measure.bench.sharegpt import RequestLimits, by_characters, limited_load
from ingot.measure.bench.throughput import throughput_entry
from ingot.measure.side.open_side import Side
from ingot.measure.side.side_spec import SideSpec, most_tokens, read_text
from ingot.measure.side.token_load import PromptSource, TokenLoad, check_counts

CHARACTERS = "characters / 4"


@dataclass(frozen=True)
class RequestLoad:
    """Requests of a file, all given at once.

    Attributes:
        load: their lengths.
        vocab_size: ids below it make the prompts: the smallest vocabulary of the sides.
        file, sha256: the file, and its hash.
        counted_by: whose tokenizer counted the tokens, or ``characters / 4``.
        cut: answers that were cut to ``limits.max_new``.
    """

    method: ClassVar[str] = METHOD
    load: TokenLoad
    vocab_size: int
    limits: RequestLimits
    file: str
    sha256: str
    counted_by: str
    cut: int = 0
    repeats: int = 3

    def __post_init__(self) -> None:
        check_counts(repeats=self.repeats)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.load.longest

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request, prompt and output."""
        return tuple(ask.prompt_tokens + ask.new_tokens for ask in self.load.asks)

    def settings(self) -> dict[str, Any]:
        """Totals, and where the requests come from."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            **self.limits.to_json(),
            "counted_by": self.counted_by,
            "requests": len(self.load.asks),
            "input_tokens": self.load.prompt_tokens,
            "output_tokens": self.load.new_tokens,
            "longest": self.longest,
            "cut": self.cut,
            "left_out": self.load.left_out,
        }


def read_request_load(
    path: Path, sides: Sequence[SideSpec], limits: RequestLimits, repeats: int = 3
) -> RequestLoad:
    """The requests of a file, in tokens of the first side that has a tokenizer; without one a token is four
    characters.

    Raises:
        ConfigError: the limits are beyond what a side takes, or the file has no request within them.
        IngotError: a side's config or tokenizer cannot be read.
    """
    for side in sides:
        _check_room(side, limits)
    counted_by, count = _counter(sides)
    raw = read_requests(path)
    load, cut = limited_load(path, raw, count, limits)
    vocab_size = min(side.config().vocab_size for side in sides)
    digest = hashlib.sha256(raw).hexdigest()[:16]
    return RequestLoad(load, vocab_size, limits, str(path), digest, counted_by, cut, repeats)


def measure_requests(side: Side, wanted: RequestLoad, batch: int, ceiling: Ceiling) -> dict[str, Any]:
    """Answer all requests ``repeats`` times, at most ``batch`` at once, after a warm-up run of one batch.

    Figures as of ``measure_throughput``, with ``input_tokens_per_s`` for the prompts' tokens over the time of
    the whole run.

    Raises:
        IngotError: the side gave another number of tokens than it was asked for.
    """
    load, source = wanted.load, PromptSource(wanted.vocab_size)
    first = load.asks[:batch]
    side.answer(first, source.prompts(first))
    runs = [side.answer(load.asks, source.prompts(load.asks)) for _ in range(wanted.repeats)]
    asked = tuple(ask.new_tokens for ask in load.asks)
    for run in runs:
        if run.tokens != asked:
            raise IngotError(
                "a side gave another number of tokens than it was asked for",
                seen=f"{sum(run.tokens)} output tokens of {side.name}",
                allowed=sum(asked),
            )
    entry = throughput_entry(load, runs, side.work, ceiling)
    del entry["raw"]
    return {"batch": batch} | {_NAMES.get(name, name): value for name, value in entry.items()}


def _counter(sides: Sequence[SideSpec]) -> tuple[str, Count]:
    """What counts the tokens of texts, and its name."""
    named = ((str(side.path), read_text(side.path).tokenizer) for side in sides if side.path is not None)
    path, tokenizer = next((pair for pair in named if pair[1] is not None), (CHARACTERS, None))
    if tokenizer is None:
        return path, by_characters
    encode = tokenizer.encode
    return path, lambda text: len(encode(text))


_NAMES = {"prompt_tokens_per_s": "input_tokens_per_s"}  # which in a sweep of equal prompts is the prefill's


def _check_room(side: SideSpec, limits: RequestLimits) -> None:
    """Raise a ConfigError if a request of both limits is longer than the side takes."""
    wanted = limits.max_prompt + limits.max_new
    if side.is_engine:
        most, what = Manifest.read(Path(side.source)).build.max_seq_len, "the engine's max_seq_len"
    else:
        config = side.config()
        most = most_tokens(side.replace(max_seq_len=config.max_positions), config)
        what = "the model's context"
    if wanted > most:
        raise ConfigError(
            f"the limits are longer than {what}",
            seen=f"{side.path or side.random_weights}: {wanted} tokens, `max_prompt` {limits.max_prompt} and "
            f"`max_new` {limits.max_new} together",
            allowed=f"<= {most}",
            field=("max_prompt", "max_new"),
        )
