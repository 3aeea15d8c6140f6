"""Beam search as a state machine on the host.

The rules are those of Hugging Face's ``generate(num_beams=...)``, and for transcripts those of OpenAI's
Whisper
(``BeamSearchDecoder``, ``MaximumLikelihoodRanker``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ingot.config.sampling_params import SamplingParams


@dataclass(frozen=True)
class Beam:
    """A live hypothesis: its generated tokens, their log-probabilities and the sum of these."""

    output_ids: tuple[int, ...]
    logprob: float
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class BeamStep:
    """The next live beam continues live beam ``parent`` (its index before the step) with ``token``."""

    parent: int
    token: int
    logprob: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class BeamResult:
    """A finished hypothesis.

    ``output_ids`` lacks the end token, which is ``end_token``: None where the length ended it. ``score`` is
    sum of log-probabilities / generated_length ** length_penalty; both count the end token, except the length
    in transcripts. ``logprobs`` has the end token's last.
    """

    output_ids: tuple[int, ...]
    score: float
    finish_reason: Literal["stop", "length"]
    end_token: int | None
    logprobs: tuple[float, ...] = field(default=(), compare=False)


Extended = tuple[float, BeamStep]  # a step, with the log-probability of all that it ends


class BeamSearch:
    """One request's search.

    Args:
        params: ``num_beams``, ``length_penalty``, ``early_stopping``, ``max_new_tokens``, the end tokens and
            the rules of a transcript, which ends with ``num_beams`` times its ``patience`` hypotheses.
        prompt_len: tokens of the prompt.
        stop_ids: the engine's own end tokens.
        max_total_tokens: the longest sequence that fits, prompt included.

    Attributes:
        live: the beams to compute next, best first; the prompt alone at the start.
        done: no step is left. A request whose prompt leaves no room is done at once, without results.
        num_candidates: how many of a beam's top tokens ``advance`` needs to be exact: num_beams that go on,
            and every end token.
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
        rules = params.transcript
        self._transcribes = rules is not None
        self._most = round(params.num_beams * (1.0 if rules is None else rules.patience)) or 1
        self.live: list[Beam] = [Beam((), 0.0)]
        self.num_candidates = params.num_beams + len(self._end_ids)
        self.done = self._max_new <= 0

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[BeamStep]:
        """Take one step: extend every live beam, retire those that end, keep the best ``num_beams``.

        Args:
            candidates: for each live beam, its ``num_candidates`` top (token, log-probability); fewer where
                the vocabulary is smaller, more are fine. Hugging Face's log-probabilities are the log-softmax
                first and the logits processors after it, without a second normalisation.

        Returns:
            The new live beams, best first; empty once ``done``.
        """
        self._length += 1
        at_limit = self._length >= self._max_new
        ranked = [
            (beam.logprob + logprob, BeamStep(parent, token, logprob))
            for parent, (beam, offered) in enumerate(zip(self.live, candidates, strict=True))
            for token, logprob in offered
            if logprob > -math.inf
        ]
        ranked.sort(key=lambda item: -item[0])
        extend = self._extended_transcripts if self._transcribes else self._extended
        kept = extend(ranked, at_limit)[: self._params.num_beams]
        self.live = [self._beam(step, logprob) for logprob, step in kept]
        self.done = at_limit or not self.live or self._settled()
        return [] if self.done else [step for _, step in kept]

    def results(self, n: int) -> list[BeamResult]:
        """The best ``n`` finished hypotheses, best first; fewer where the search holds fewer."""
        return self._finished[:n]

    def _extended(self, ranked: Sequence[Extended], at_limit: bool) -> list[Extended]:
        going_on = []
        for rank, (logprob, step) in enumerate(ranked):
            ended = step.token in self._end_ids
            if not ended and not at_limit:
                going_on.append((logprob, step))
            elif rank < self._params.num_beams:  # lower ranks may go on, never finish
                self._finish(step, logprob, ended)
        return going_on

    def _extended_transcripts(self, ranked: Sequence[Extended], at_limit: bool) -> list[Extended]:
        """As ``_extended``; hypotheses that are likelier than the last that goes on finish, in order."""
        going_on: list[Extended] = []
        for logprob, step in ranked:
            if len(going_on) == self._params.num_beams:
                break
            if step.token not in self._end_ids:
                going_on.append((logprob, step))
            elif len(self._finished) < self._most:
                self._finish(step, logprob, ended=True)
        if not at_limit and not self._settled():
            return going_on
        # With a patience below 1 the likeliest live ones compete, too.
        for logprob, step in going_on[: max(self._params.num_beams - len(self._finished), 0)]:
            self._finish(step, logprob, ended=False)
        return []

    def _beam(self, step: BeamStep, logprob: float) -> Beam:
        parent = self.live[step.parent]
        return Beam((*parent.output_ids, step.token), logprob, (*parent.logprobs, step.logprob))

    def _finish(self, step: BeamStep, logprob: float, ended: bool) -> None:
        beam = self._beam(step, logprob)
        result = BeamResult(
            output_ids=beam.output_ids[:-1] if ended else beam.output_ids,
            score=self._score(logprob, ended),
            finish_reason="stop" if ended else "length",
            end_token=step.token if ended else None,
            logprobs=beam.logprobs,
        )
        ranked = sorted([*self._finished, result], key=lambda r: -r.score)
        self._finished = ranked[: max(self._most, self._params.num_beams)]

    def _score(self, logprob: float, ended: bool = False) -> float:
        length = max(self._length - ended, 1) if self._transcribes else self._length
        return float(logprob / length**self._params.length_penalty)

    def _settled(self) -> bool:
        """Whether the finished hypotheses are complete and, except in transcripts, no live beam would improve
        them.

        The best live beam is judged by its score at its present length, Hugging Face's rule for
        ``early_stopping=False``: with a positive length penalty it may end a search that could still gain.
        """
        if self._transcribes:
            return len(self._finished) >= self._most
        if len(self._finished) < self._params.num_beams:
            return False
        return self._params.early_stopping or self._score(self.live[0].logprob) <= self._finished[-1].score


def top_candidates(logprobs: torch.Tensor, k: int) -> list[list[tuple[int, float]]]:
    """Each row's ``k`` (or V) likeliest (token, log-probability) of ``logprobs`` [B, V], best first."""
    top = torch.topk(logprobs, min(k, logprobs.shape[-1]), dim=-1)
    packed = torch.stack([top.indices.double(), top.values.double()], dim=-1).tolist()
    return [[(int(token), logprob) for token, logprob in row] for row in packed]
