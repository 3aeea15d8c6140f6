"""Many requests at once: tokens per second, and how long each request waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.bench.latency import METHOD
from ingot.measure.side.open_side import Say, Side, silent
from ingot.measure.side.step_work import Work
from ingot.measure.side.timed_run import Run, median, spread
from ingot.measure.side.token_load import PromptSource, TokenLoad, check_counts


@dataclass(frozen=True)
class Throughput:
    """A load, answered ``repeats`` times."""

    verb: ClassVar[str] = "throughput"
    method: ClassVar[str] = METHOD
    compared: ClassVar[tuple[str, ...]] = ("output_tokens_per_s", "ttft", "tpot")
    load: TokenLoad
    repeats: int = 3

    def __post_init__(self) -> None:
        check_counts(repeats=self.repeats)

    def to_json(self) -> dict[str, Any]:
        return {"load": self.load.to_json(), "repeats": self.repeats}


def measure_throughput(
    side: Side, load: TokenLoad, repeats: int, ceiling: Ceiling, say: Say = silent
) -> dict[str, Any]:
    """Answer the load ``repeats`` times, after a warm-up run.

    ``ttft_ms`` counts from the moment when all requests were given, waiting included; ``tpot_ms`` is of each
    request after its first token; both over the requests of all repeats. Tokens/s and requests/s are those
    of the median run. ``mfu``: operations of the whole load / its time / matmul ceiling.
    """
    source = PromptSource(side.vocab_size)
    say(f"{side.name}: warming up")
    side.answer(load.asks, source.prompts(load.asks))
    runs = []
    for repeat in range(repeats):
        say(f"{side.name}: {load.name}, run {repeat + 1} of {repeats}")
        runs.append(side.answer(load.asks, source.prompts(load.asks)))
    return throughput_entry(load, runs, side.work, ceiling)


def throughput_entry(load: TokenLoad, runs: list[Run], work: Work, ceiling: Ceiling) -> dict[str, Any]:
    seconds = median([r.seconds for r in runs])
    return {
        "seconds": spread([r.seconds for r in runs]),
        "requests_per_s": round(len(load.asks) / seconds, 3),
        "output_tokens_per_s": round(load.new_tokens / seconds, 1),
        "prompt_tokens_per_s": round(load.prompt_tokens / seconds, 1),
        "ttft_ms": spread([t for r in runs for t in r.ttft_s], 1e3),
        "tpot_ms": spread([t for r in runs for t in r.tpot_s], 1e3),
        "mfu": round(load_flops(work, load) / seconds / (ceiling.matmul_tflop_s * 1e12), 4),
        "raw": [r.to_json() for r in runs],
    }


def load_flops(work: Work, load: TokenLoad) -> float:
    """Operations of a load: each prompt's prefill, then a decode step per further token."""
    return sum(
        work.prefill_flops(1, a.prompt_tokens)
        + (a.new_tokens - 1) * work.decode_flops(1, a.prompt_tokens + a.new_tokens / 2)
        for a in load.asks
    )
