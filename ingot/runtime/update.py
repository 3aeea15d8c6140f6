"""Updates that an executor gives about its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ingot.errors import IngotError
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.runtime.scheduling.beam import BeamResult
from ingot.runtime.scheduling.request import FinishReason


@dataclass(slots=True)  # frozen, it takes three times as long to make: one per token
class Update:
    """An update of one answer of a request.

    ``token_ids`` are new tokens, without an end token; ``finish_reason`` is None until the answer ends, and
    ``stop_id`` the end token that was reached. ``logprobs`` go with the tokens, ``stop_logprob`` with the end
    token. ``index`` counts the answers of a request (``n`` or beams). ``error``: why the request has ended
    without an answer. ``num_reused``: tokens of the prompt that were in the prefix cache.
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
    """The final updates of a beam search; ``first`` counts among the top tokens of the first place."""
    updates = []
    for index, one in enumerate(results):
        update = Update(
            request_id, index, one.output_ids, FinishReason(one.finish_reason), one.end_token, score=one.score
        )
        if logprobs:
            tops = [() if first is None or place else (first,) for place in range(len(one.output_ids))]
            values = zip(one.output_ids, one.logprobs, tops, strict=False)
            stop = one.logprobs[-1] if one.end_token is not None else None
            given = tuple(TokenLogprobs(*value) for value in values)
            update = replace(update, logprobs=given, stop_logprob=stop)
        updates.append(update)
    return updates
