"""Updates that an executor gives about its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.errors import IngotError
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.runtime.scheduling.beam import BeamResult
from ingot.runtime.scheduling.request import FinishReason


@dataclass(frozen=True)
class Update:
    """News of one answer of a request.

    ``token_ids`` are new tokens, without an end token; ``finish_reason`` is None while the answer goes on,
    and ``stop_id`` the end token that was reached. ``logprobs`` go with the tokens, ``stop_logprob`` with the
    end token. ``index`` counts the answers of a request (``n`` or beams). ``error``: why the request has
    ended without an answer. ``num_reused``: tokens of the prompt that were in the prefix cache.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop_logprob: float | None = None
    score: float | None = None
    error: IngotError | None = None
    num_reused: int = 0


def updates_of_beams(
    request_id: str, results: Sequence[BeamResult], first: tuple[int, float] | None, *, logprobs: bool
) -> list[Update]:
    """The ends of a beam search's answers; ``first`` is told as the likeliest token of the first place."""
    return [
        replace(_ended(request_id, i, one), **(_told(one, first) if logprobs else {}))
        for i, one in enumerate(results)
    ]


def _ended(request_id: str, index: int, one: BeamResult) -> Update:
    reason = FinishReason(one.finish_reason)
    return Update(request_id, index, one.output_ids, reason, one.end_token, score=one.score)


def _told(one: BeamResult, first: tuple[int, float] | None) -> dict[str, Any]:
    tops = [() if first is None or place else (first,) for place in range(len(one.output_ids))]
    values = zip(one.output_ids, one.logprobs, tops, strict=False)
    stop = one.logprobs[-1] if one.end_token is not None else None
    return {"logprobs": tuple(TokenLogprobs(*told) for told in values), "stop_logprob": stop}
