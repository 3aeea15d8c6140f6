"""From a step's logits to each request's next token.

Owns the order of things between logits and token (penalties, logits processors, masks, sampling or beam
candidates, log-probabilities), and how a request's values become a row's. Knows nothing of scheduling.

    draws = selector.draws(requests, counted=True)       # for a step that chooses the tokens itself
    choices = selector.select(requests, logits)          # here, on the host's turn
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ingot.config.sampling import SamplingParams
from ingot.errors import EngineError, RequestError
from ingot.kernels.sampling.masks import mask_tokens
from ingot.kernels.sampling.token_feed import NOT_A_NUMBER
from ingot.runtime.beam import top_candidates
from ingot.runtime.grammar_masks import GrammarMasks
from ingot.runtime.log_normaliser import log_normaliser
from ingot.runtime.logits import apply_brought
from ingot.runtime.request import Request
from ingot.runtime.sampler import RowSampling, SamplingTensors, sample
from ingot.runtime.token_counts import TokenCounts
from ingot.runtime.token_logprobs import ROW_WIDTH, TokenLogprobs, leave_logprobs, read_logprobs
from ingot.runtime.token_masks import TokenMasks
from ingot.runtime.transcript import hold_to_transcript


@dataclass
class Choice:
    """What a step gives a request: a token, or candidates for its beam search; ``error``: neither.

    ``first`` is told before the likeliest tokens.
    """

    request: Request
    token_id: int = NOT_A_NUMBER
    logprobs: TokenLogprobs | None = None
    candidates: list[tuple[int, float]] = field(default_factory=list)
    first: tuple[int, float] | None = None
    error: RequestError | None = None

    def tell_first(self, likely: tuple[int, float] | None) -> None:
        """Put a token before the likeliest ones, where log-probabilities are wanted."""
        self.first = likely
        if likely is not None and self.logprobs is not None:
            self.logprobs = replace(self.logprobs, top=(likely, *self.logprobs.top))


class TokenSelector:
    """Gives each request's row its values, and turns rows of logits into choices."""

    def __init__(
        self, stop_ids: frozenset[int], counts: TokenCounts, masks: GrammarMasks | None = None
    ) -> None:
        self._stop_ids = stop_ids
        self._counts = counts
        own = TokenMasks(counts.max_requests, counts.vocab_size, counts.device)
        self._masks = GrammarMasks(own) if masks is None else masks

    @staticmethod
    def needs_host(request: Request) -> bool:
        """Whether what follows from the request's logits is decided on the host: beams, functions that the
        request brought, the rules of transcripts.
        """
        params = request.params
        return params.num_beams > 1 or bool(params.logits_processors) or params.transcript is not None

    def forget(self, request: Request) -> None:
        """Give back what a request holds on the device: it has ended or was preempted."""
        self._counts.release(request)

    def draws(self, requests: Sequence[Request], *, counted: bool) -> list[RowSampling]:
        """How each request's next token is chosen, once the device holds what is known of its tokens, and the
        masks of grammars.

        ``counted``: by a step that counts the tokens itself (``leave_tokens``).
        """
        ends = [self._banned(request) for request in requests]
        ruled = [i for i, request in enumerate(requests) if ends[i] or has_rules(request.params)]
        slots = self._counts.slots([requests[i] for i in ruled], [ends[i] for i in ruled], counted=counted)
        slot_of = dict(zip(ruled, slots, strict=True))
        masks = self._masks.place(requests)
        return [row_sampling(request, slot_of.get(i, -1), masks[i]) for i, request in enumerate(requests)]

    @torch.inference_mode()
    def select(
        self, requests: Sequence[Request], logits: torch.Tensor, num_candidates: int = 0
    ) -> list[Choice]:
        """One choice a row of ``logits`` [B, vocab_size]; rows of beam requests get ``num_candidates``
        tokens.
        """
        choices = [Choice(request) for request in requests]
        tensors = SamplingTensors.from_rows(self.draws(requests, counted=False), self._counts.device)
        beams = [i for i, r in enumerate(requests) if r.params.num_beams > 1]
        bringing = [(i, r) for i, r in enumerate(requests) if r.params.logits_processors]
        rows = logits
        speech = any(request.params.transcript is not None for request in requests)
        if beams or bringing or speech or tensors.any_masks:  # rows will change
            rows = logits.to(torch.float32, copy=True)
        said = _hold_to_transcripts(requests, rows) if speech else {}
        if speech:
            logits = rows.clone()
        if beams:
            rows[beams] = (rows[beams] - log_normaliser(rows[beams])).float()
        if tensors.any_rules:
            rows = tensors.penalized(rows, self._counts)
        for i, request in bringing:
            try:
                ids = [*request.prompt_ids, *request.output_ids]
                apply_brought(request.params.logits_processors, ids, rows[i])
            except RequestError as error:
                choices[i].error = error
        if tensors.any_masks:
            mask_tokens(rows, self._masks.table.table, tensors.mask)
        if beams:
            for i, found in zip(beams, top_candidates(rows[beams], num_candidates), strict=True):
                choices[i].candidates = found
        if len(beams) < len(requests):
            _sample(choices, rows, logits, tensors)
        for i, likely in said.items():
            choices[i].tell_first(likely)
        return choices

    def _banned(self, request: Request) -> frozenset[int]:
        """End tokens that cannot be the request's next token; a grammar sees to its own."""
        params = request.params
        if params.grammar is not None:
            return frozenset()
        if len(request.output_ids) + request.num_pending >= params.min_new_tokens:
            return frozenset()
        return params.end_ids(self._stop_ids)


def _sample(choices: list[Choice], rows: torch.Tensor, raw: torch.Tensor, tensors: SamplingTensors) -> None:
    """Draw from ``rows``; log-probabilities are of ``raw``, the model's own logits."""
    output = sample(rows, tensors)
    told: list[list[float]] = []
    if tensors.any_logprobs:
        found = torch.empty(len(choices), ROW_WIDTH, dtype=torch.float64, device=raw.device)
        leave_logprobs(raw, output.token_ids, found)
        told = found.tolist()
    both = torch.stack([output.token_ids.double(), output.values.double()])
    tokens, logits = both.tolist()  # one wait for the device
    for i, (choice, token, logit) in enumerate(zip(choices, map(int, tokens), logits, strict=True)):
        choice.token_id = NOT_A_NUMBER if math.isnan(logit) else token
        wanted = choice.request.params.logprobs
        if wanted is not None:
            choice.logprobs = read_logprobs(told[i], token, wanted)


def _hold_to_transcripts(
    requests: Sequence[Request], rows: torch.Tensor
) -> dict[int, tuple[int, float] | None]:
    """Rule out tokens in the rows of transcripts: by row, at their first place ``no_speech`` and its
    log-probability.
    """
    found: dict[int, tuple[int, float] | None] = {}
    for i, request in enumerate(requests):
        rules = request.params.transcript
        if rules is None:
            continue
        first = not request.output_ids and request.params.logprobs is not None
        found[i] = (rules.no_speech, float(rows[i].log_softmax(0)[rules.no_speech])) if first else None
        hold_to_transcript(rules, request.output_ids, rows[i])
    return found


def has_rules(params: SamplingParams) -> bool:
    """Whether a request has a bias, or penalizes tokens that it has seen."""
    changed = params.presence_penalty or params.frequency_penalty or params.logit_bias
    return params.repetition_penalty != 1.0 or bool(changed)


def not_a_number(request: Request) -> EngineError:
    """The error for a model that gives no numbers."""
    return EngineError(
        "the model's logits are not numbers (NaN)",
        seen=f"NaN after {request.num_known} tokens",
        fix="build with --dtype bf16 or fp32 if fp16 overflows; otherwise the weights are broken",
    )


def row_sampling(request: Request, slot: int = -1, mask: int = -1) -> RowSampling:
    """How the request draws its next token, with the slot and the mask that it has: a pure function of its
    values, its answer index and its output's length.
    """
    params = request.params
    temperature = params.temperature if params.num_beams == 1 else 0.0
    seed = params.seed if params.seed is not None else 0
    return RowSampling(
        temperature=temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed
        ^ (zlib.crc32(request.sample_index.to_bytes(4, "little")) << 16 if request.sample_index else 0),
        step=len(request.output_ids) + request.num_pending,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        min_new=params.min_new_tokens,
        slot=slot,
        biased=len(params.logit_bias),
        mask=mask,
        logprobs=params.logprobs is not None,
    )
