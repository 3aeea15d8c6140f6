"""Throughput, latency and goodput of one load point, and signs that they cannot be trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ingot.errors import ConfigError
from ingot.measure.bench.serving.http_answer import HttpAnswer
from ingot.measure.side.timed_run import spread_with_mean

LIMITS = ("ttft", "tpot", "e2e")
_LATE_MS = 10.0
_BUSY = 0.7  # of one core
_JOINED = 1.05  # tokens per chunk
Record = dict[str, Any]


def parse_limits(text: str) -> dict[str, float]:
    """``"ttft:500,tpot:50"`` → milliseconds by name."""
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = 0.0
        if name not in LIMITS or not found[name] > 0:
            allowed = "ttft:MS, tpot:MS, e2e:MS, separated by commas"
            raise ConfigError("not a limit", seen=part, allowed=allowed, field="goodput")
    return found


def serving_entry(
    answers: Sequence[HttpAnswer], asked: Sequence[int], seconds: float, limits_ms: Mapping[str, float]
) -> Record:
    """Figures of the requests that succeeded.

    Args:
        asked: output tokens that each request wanted.
        seconds: from the start of the load to the end of its last request; rates are over it.

    ``in_flight``: average requests in flight. ``good_per_s``: requests within all limits per second; None
    without limits. ``late_ms``: the client's delay in sending. ``short``: answers with another number of
    tokens than asked. ``counted``: answers whose chunks are counted as tokens.
    """
    done = [answer for answer in answers if answer.error is None]
    tokens, chunks = sum(a.tokens for a in done), sum(a.chunks for a in done)
    prompts = [a.prompt_tokens for a in done if a.prompt_tokens is not None]
    known = bool(done) and len(prompts) == len(done)
    pairs = zip(answers, asked, strict=True)

    def good(answer: HttpAnswer) -> bool:
        seen = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2e": answer.e2e_s}
        return all(1e3 * seen[name] <= limit for name, limit in limits_ms.items())

    return {
        "requests": len(answers),
        "completed": len(done),
        "errors": dict(Counter(a.error for a in answers if a.error is not None)),
        "told": {a.error: a.message for a in reversed(answers) if a.error is not None},
        "seconds": round(seconds, 6),
        "requests_per_s": round(len(done) / seconds, 4),
        "output_tokens_per_s": round(tokens / seconds, 2),
        "prompt_tokens_per_s": round(sum(prompts) / seconds, 2) if known else None,
        "good_per_s": round(sum(map(good, done)) / seconds, 4) if limits_ms else None,
        "in_flight": round(sum(a.e2e_s for a in done) / seconds, 2),
        "ttft_ms": spread_with_mean([a.ttft_s for a in done], 1e3),
        "tpot_ms": spread_with_mean([a.tpot_s for a in done if a.tpot_s is not None], 1e3),
        "itl_ms": spread_with_mean([gap for a in done for gap in a.gaps_s], 1e3),
        "e2e_ms": spread_with_mean([a.e2e_s for a in done], 1e3),
        "late_ms": spread_with_mean([a.late_s for a in answers], 1e3),
        "output_tokens": tokens,
        "prompt_tokens": sum(prompts) if known else None,
        "tokens_per_chunk": round(tokens / chunks, 3) if chunks else None,
        "short": sum(a.error is None and a.tokens != wanted for a, wanted in pairs),
        "counted": sum(a.counted for a in done),
    }


def serving_doubts(entry: Record) -> Iterator[str]:
    """One line per sign in the entry of a point."""
    for kind, count in entry["errors"].items():
        yield f"{count} of {entry['requests']} requests failed, {kind}: {entry['told'][kind]}"
    if entry["counted"]:
        yield f"{entry['counted']} answers came without usage: their chunks are counted as tokens"
    elif entry["tokens_per_chunk"] and entry["tokens_per_chunk"] > _JOINED:
        yield f"a chunk holds {entry['tokens_per_chunk']} tokens: ITL is of chunks, TPOT of tokens"
    if entry["short"]:
        yield f"{entry['short']} answers have other numbers of tokens than asked for"
    if entry["late_ms"]["p99"] > _LATE_MS:
        yield f"the client sent requests up to {entry['late_ms']['most']:.0f} ms late"
    if entry["client_cpu"] > _BUSY:
        yield f"the client took {entry['client_cpu']:.0%} of a core: its own delays are in the figures"
