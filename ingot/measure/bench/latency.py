"""Batches of equal requests that arrive together: how long until the first token, how long a step.

Owns the method and its figures. Knows no engine and no output format.

    for entry in measure_latency(side, Latency(batches=(1, 8)), ceiling): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.side.open_side import Say, Side, silent
from ingot.measure.side.timed_run import Run, median, spread
from ingot.measure.side.token_load import Ask, PromptSource, check_counts, fixed


@dataclass(frozen=True)
class Latency(JsonConfig):
    """What is measured: for each batch size, ``repeats`` runs of one new token and of ``new_tokens``.

    Raises:
        ConfigError: a number is below 1.
    """

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
        """Tokens of a request, prompt and output together."""
        return self.prompt_tokens + self.new_tokens

    def prompts(self, source: PromptSource, asks: Sequence[Ask]) -> list[list[int]]:
        """A prompt for each request: new random ones."""
        return source.prompts(asks)


def measure_latency(
    side: Side,
    wanted: Latency,
    ceiling: Ceiling,
    say: Say = silent,
    more: Callable[[list[Run]], dict[str, Any]] = lambda runs: {},
) -> list[dict[str, Any]]:
    """One entry a batch size, in the order asked for; ``more`` adds figures of the whole runs.

    Before a batch size is timed, one whole run of it is thrown away. Its figures:
    ``ttft_ms``: time of one new token for the whole batch. ``decode_ms``: (time of N new tokens - time of
    1) / (N - 1), of each repeat: it holds the steps that mix prompts and decodes. ``together_ms``: of a step
    while the whole batch decodes. ``streamed``: TTFT and TPOT as each request's tokens arrive.
    ``prompt_tokens_per_s``: of the prefill (TTFT). ``output_tokens_per_s`` and ``requests_per_s``: of whole
    runs. ``mbu``: bytes that a decode step must read / decode time / read ceiling, the context as long as it
    is on average. ``mfu_prefill``, ``mfu_decode``: operations / time / matmul ceiling.

    Raises:
        ConfigError: a batch or a request is larger than the side can take.
    """
    check_fits(side, wanted.most, wanted.longest)
    return list(_entries(side, wanted, ceiling, say, more))


def check_fits(side: Side, batch: int, longest: int) -> None:
    """Raises:
    ConfigError: the side takes smaller batches or shorter requests only.
    """
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
    """Raises:
    ConfigError: a request has more tokens than ``most``, which is ``what``.
    """
    if longest > most:
        raise ConfigError(
            f"the requests are longer than {what}",
            seen=f"{longest} tokens, prompt and output together",
            allowed=f"<= {most}",
            field=("prompt_tokens", "new_tokens"),
            fix=fix,
        )


def _entries(
    side: Side, wanted: Latency, ceiling: Ceiling, say: Say, more: Callable[[list[Run]], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
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
