"""Batches of equal requests that arrive together: the time to the first token, and per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.side.open_side import Say, Side, silent
from ingot.measure.side.timed_run import Run, median, spread, spread_with_mean
from ingot.measure.side.token_load import Ask, PromptSource, check_counts, fixed

METHOD = "greedy, end tokens ignored, new random prompts at every call so that no prefix is reused"


@dataclass(frozen=True)
class Latency(JsonConfig):
    """For each batch size, ``repeats`` runs of one new token and of ``new_tokens``."""

    verb: ClassVar[str] = "latency"
    method: ClassVar[str] = METHOD
    compared: ClassVar[tuple[str, ...]] = ("batch", "ttft", "decode", "output_tokens_per_s")
    batches: tuple[int, ...] = (1, 8, 32, 64)
    prompt_tokens: int = 512
    new_tokens: int = 128
    repeats: int = 5

    def __post_init__(self) -> None:
        for batch in self.batches:
            fixed(batch, self.prompt_tokens, self.new_tokens)
        check_counts(repeats=self.repeats)

    @property
    def most(self) -> int:
        return max(self.batches)

    @property
    def longest(self) -> int:
        """Tokens of a request, prompt and output."""
        return self.prompt_tokens + self.new_tokens

    def prompts(self, source: PromptSource, asks: Sequence[Ask]) -> list[list[int]]:
        """A new random prompt for each request."""
        return source.prompts(asks)


@dataclass(frozen=True)
class TextLatency(Latency):
    """Requests that all have the prompt ``prompt``, of ``prompt_tokens`` ids."""

    method: ClassVar[str] = (
        "greedy, end tokens ignored, the text as the prompt of every request, no prefix reuse"
    )
    compared: ClassVar[tuple[str, ...]] = ("batch", "ttft", "decode", "s_per_character")
    prompt: tuple[int, ...] = ()

    @classmethod
    def of(cls, ids: Sequence[int], batches: tuple[int, ...], new_tokens: int, repeats: int) -> Self:
        if not ids:
            raise ConfigError("the text is empty", field="text")
        return cls(batches, len(ids), new_tokens, repeats, tuple(ids))

    def prompts(self, source: PromptSource, asks: Sequence[Ask]) -> list[list[int]]:
        return [list(self.prompt) for _ in asks]


def measure_latency(
    side: Side,
    wanted: Latency,
    ceiling: Ceiling,
    say: Say = silent,
    more: Callable[[list[Run]], dict[str, Any]] = lambda runs: {},
) -> Iterator[dict[str, Any]]:
    """One entry per batch size, as each is measured, after a warm-up run; ``more`` adds figures of the whole
    runs.

    ``ttft_ms``: time of one new token for the whole batch. ``decode_ms``: (time of N new tokens - time of
    1) / (N - 1), of each repeat: it includes the steps that mix prompts and decodes. ``together_ms``: of a
    step while the whole batch decodes. ``streamed``: TTFT and TPOT as each request's tokens arrive.
    ``prompt_tokens_per_s``: of the prefill (TTFT). ``output_tokens_per_s`` and ``requests_per_s``: of whole
    runs. ``mbu``: bytes that a decode step must read, with the average context / decode time / read ceiling.
    ``mfu_prefill``, ``mfu_decode``: operations / time / matmul ceiling.
    """
    source = PromptSource(side.vocab_size)
    for batch in wanted.batches:
        whole = (Ask(wanted.prompt_tokens, wanted.new_tokens),) * batch
        one = (Ask(wanted.prompt_tokens, 1),) * batch
        say(f"{side.name}: batch {batch}, warming up")
        side.answer(whole, wanted.prompts(source, whole))
        firsts, runs = [], []
        for repeat in range(wanted.repeats):
            say(f"{side.name}: batch {batch}, run {repeat + 1} of {wanted.repeats}")
            firsts.append(side.answer(one, wanted.prompts(source, one)))
            again = wanted.new_tokens > 1
            runs.append(side.answer(whole, wanted.prompts(source, whole)) if again else firsts[-1])
        yield latency_entry(side, wanted, batch, firsts, runs, ceiling) | more(runs)


def check_fits(side: Side, batch: int, longest: int) -> None:
    """Raise a ConfigError if the batch or a request is larger than the side takes."""
    if batch > side.max_batch_size:
        raise ConfigError(
            "the batch is larger than the engine's max_batch_size",
            seen=batch,
            allowed=f"<= {side.max_batch_size}",
            field="batch",
            fix="`batch`, or build with a larger `max_batch_size`",
        )
    fix = "`prompt_tokens`, `new_tokens` or `fixed`; or a larger `max_seq_len`"
    check_length(longest, side.max_seq_len, "the engine's limit", fix)


def check_length(longest: int, most: int, what: str, fix: str) -> None:
    """Raise a ConfigError if a request has more tokens than ``most``, which is ``what``."""
    if longest > most:
        raise ConfigError(
            f"the requests are longer than {what}",
            seen=f"{longest} tokens, prompt and output together",
            allowed=f"<= {most}",
            field=("prompt_tokens", "new_tokens"),
            fix=fix,
        )


def latency_entry(
    side: Side, wanted: Latency, batch: int, firsts: list[Run], runs: list[Run], ceiling: Ceiling
) -> dict[str, Any]:
    prompt, new = wanted.prompt_tokens, wanted.new_tokens
    ttft, total = median([r.seconds for r in firsts]), median([r.seconds for r in runs])
    steps = [(r.seconds - f.seconds) / (new - 1) for f, r in zip(firsts, runs, strict=True) if new > 1]
    work, context = side.work, prompt + new / 2
    read, multiplied = ceiling.read_gb_s * 1e9, ceiling.matmul_tflop_s * 1e12
    step = median(steps) if steps else None
    return {
        "batch": batch,
        "ttft_ms": spread([r.seconds for r in firsts], 1e3),
        "decode_ms": spread(steps, 1e3),
        "together_ms": spread([t for r in runs for t in r.together_s], 1e3),
        "streamed": {
            "ttft_ms": spread([t for r in runs for t in r.ttft_s], 1e3),
            "tpot_ms": spread([t for r in runs for t in r.tpot_s], 1e3),
        },
        "prompt_tokens_per_s": round(batch * prompt / ttft, 1),
        "output_tokens_per_s": round(batch * new / total, 1),
        "requests_per_s": round(batch / total, 3),
        "mbu": step and _share(work.decode_bytes(batch, context) / step, read),
        "mfu_decode": step and _share(work.decode_flops(batch, context) / step, multiplied),
        "mfu_prefill": _share(work.prefill_flops(batch, prompt) / ttft, multiplied),
        "raw": {"one_new": [r.to_json() for r in firsts], "all_new": [r.to_json() for r in runs]},
    }


def _share(rate: float, ceiling: float) -> float:
    return round(rate / ceiling, 4)


def character_figures(runs: Sequence[Run], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """``s_per_character``: seconds of each run over an answer's characters, averaged over the batch (None if
    no answer has any). ``characters``: of an answer, in each run.
    """
    counts = [sum(len(decode(ids)) for ids in run.token_ids) / len(run.token_ids) for run in runs]
    times = [run.seconds / count for run, count in zip(runs, counts, strict=True) if count]
    return {"s_per_character": spread_with_mean(times), "characters": counts}
