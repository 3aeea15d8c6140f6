"""Beam search, as a state machine over numbers on the host.

Owns the live beams of one request, the finished hypotheses, their scores and the rule that ends the search:
those of Hugging Face's ``generate(num_beams=...)``. Knows no model, cache or scheduler: whoever drives it
computes each live beam's candidates and moves the cache as the steps say.

    search = BeamSearch(params, prompt_len=len(prompt), stop_ids=eos, max_total_tokens=2048)
    while not search.done:
        steps = search.advance(top_candidates(logprobs_of_live_beams, search.num_candidates))
    best = search.results(params.n)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ingot.config.sampling import SamplingParams


@dataclass(frozen=True)
class Beam:
    """A live hypothesis: its generated tokens and the sum of their log-probabilities."""

    output_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class BeamStep:
    """The next live beam continues live beam ``parent`` (its index before the step) with ``token``."""

    parent: int
    token: int


@dataclass(frozen=True)
class BeamResult:
    """A finished hypothesis.

    ``output_ids`` lacks the end token, which is ``end_token``: None where the length ended it. ``score`` is
    sum of log-probabilities / generated_length ** length_penalty; both count the end token.
    """

    output_ids: tuple[int, ...]
    score: float
    finish_reason: Literal["stop", "length"]
    end_token: int | None


class BeamSearch:
    """One request's search.

    Args:
        params: ``num_beams``, ``length_penalty``, ``early_stopping``, ``max_new_tokens`` and the end tokens.
        prompt_len: tokens of the prompt.
        stop_ids: the engine's own end tokens.
        max_total_tokens: the longest sequence that fits, prompt included.

    Attributes:
        live: the beams to compute next, best first; the prompt alone at the start.
        done: no step is left. A request whose prompt leaves no room is done at once, without results.
        num_candidates: how many of a beam's likeliest tokens ``advance`` needs to be exact: num_beams that
            go on, and every end token.
    """

    def __init__(
        self, params: SamplingParams, prompt_len: int, stop_ids: frozenset[int], max_total_tokens: int
    ) -> None:
        self._params = params
        self._end_ids = params.end_ids(stop_ids)
        room = max_total_tokens - prompt_len
        self._max_new = room if params.max_new_tokens is None else min(room, params.max_new_tokens)
        self._length = 0
        self._finished: list[BeamResult] = []
        self.live: list[Beam] = [Beam((), 0.0)]
        self.num_candidates = params.num_beams + len(self._end_ids)
        self.done = self._max_new <= 0

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[BeamStep]:
        """Take one step: extend every live beam, retire those that end, keep the best ``num_beams``.

        Args:
            candidates: for each live beam, its ``num_candidates`` likeliest (token, log-probability); fewer
                where the vocabulary is smaller, more are welcome. Hugging Face's log-probabilities are the
                log-softmax first and the logits processors after it, without a second normalisation.

        Returns:
            The new live beams, best first; empty once ``done``.
        """
        self._length += 1
        at_limit = self._length >= self._max_new
        going_on: list[tuple[float, BeamStep]] = []
        for rank, (logprob, step) in enumerate(self._ranked(candidates)):
            ended = step.token in self._end_ids
            if not ended and not at_limit:
                going_on.append((logprob, step))
            elif rank < self._params.num_beams:  # lower ranks stand by to go on, never to finish
                self._finish(step, logprob, ended)
        kept = going_on[: self._params.num_beams]
        self.live = [
            Beam((*self.live[step.parent].output_ids, step.token), logprob) for logprob, step in kept
        ]
        self.done = at_limit or not self.live or self._settled()
        return [] if self.done else [step for _, step in kept]

    def results(self, n: int) -> list[BeamResult]:
        """The best ``n`` finished hypotheses, best first; fewer where the search holds fewer."""
        return self._finished[:n]

    def _ranked(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, BeamStep]]:
        pool = [
            (beam.logprob + logprob, BeamStep(parent, token))
            for parent, (beam, offered) in enumerate(zip(self.live, candidates, strict=True))
            for token, logprob in offered
            if logprob > -math.inf
        ]
        return sorted(pool, key=lambda item: -item[0])

    def _finish(self, step: BeamStep, logprob: float, ended: bool) -> None:
        output_ids = self.live[step.parent].output_ids
        result = BeamResult(
            output_ids=output_ids if ended else (*output_ids, step.token),
            score=self._score(logprob),
            finish_reason="stop" if ended else "length",
            end_token=step.token if ended else None,
        )
        ranked = sorted([*self._finished, result], key=lambda r: -r.score)
        self._finished = ranked[: self._params.num_beams]

    def _score(self, logprob: float) -> float:
        return float(logprob / self._length**self._params.length_penalty)

    def _settled(self) -> bool:
        """The finished hypotheses are complete, and no live beam is taken to improve on them.

        The best live beam is judged by its score at its present length, Hugging Face's rule for
        ``early_stopping=False``: with a positive length penalty it may end a search that could still gain.
        """
        if len(self._finished) < self._params.num_beams:
            return False
        return self._params.early_stopping or self._score(self.live[0].logprob) <= self._finished[-1].score


def top_candidates(logprobs: torch.Tensor, k: int) -> list[list[tuple[int, float]]]:
    """Each row's ``k`` likeliest (token, log-probability), best first; waits once for the device.

    Args:
        logprobs: [B, V] float32.
        k: cut to V.
    """
    top = torch.topk(logprobs, min(k, logprobs.shape[-1]), dim=-1)
    packed = torch.stack([top.indices.double(), top.values.double()], dim=-1).tolist()
    return [[(int(token), logprob) for token, logprob in row] for row in packed]
