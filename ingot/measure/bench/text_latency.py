"""One text as the prompt, and the time of each character of its answer.

Owns the request and its figure. Knows no engine.

    wanted = TextLatency.of(tokenizer.encode(text), batches=(1,), new_tokens=128, repeats=5)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ingot.errors import ConfigError
from ingot.measure.bench.latency import Latency
from ingot.measure.side.timed_run import Run, spread_with_mean
from ingot.measure.side.token_load import Ask, PromptSource

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class TextLatency(Latency):
    """Every request has the prompt ``prompt``, which has ``prompt_tokens`` ids."""

    prompt: tuple[int, ...] = ()

    @classmethod
    def of(cls, ids: Sequence[int], batches: tuple[int, ...], new_tokens: int, repeats: int) -> Self:
        """
        Raises:
            ConfigError: there are no ids.
        """
        if not ids:
            raise ConfigError("the text is empty", field="text")
        return cls(batches, len(ids), new_tokens, repeats, tuple(ids))

    def prompts(self, source: PromptSource, asks: Sequence[Ask]) -> list[list[int]]:
        return [list(self.prompt) for _ in asks]


def character_figures(runs: Sequence[Run], decode: Decode) -> dict[str, Any]:
    """``s_per_character``: seconds of each run over the characters of an answer, on average in the batch;
    None where no answer has any. ``characters``: of an answer, in each run.
    """
    counts = [sum(len(decode(ids)) for ids in run.token_ids) / len(run.token_ids) for run in runs]
    times = [run.seconds / count for run, count in zip(runs, counts, strict=True) if count]
    return {"s_per_character": spread_with_mean(times), "characters": counts}
