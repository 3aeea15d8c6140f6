"""From a step's logits to each request's next token.

Owns the order of things between logits and token: logits processors, sampling or beam candidates,
log-probabilities. Knows nothing of scheduling.

    choices = TokenSelector(stop_ids, vocab_size, device).select(requests, logits)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ingot.errors import EngineError, RequestError
from ingot.kernels.sampling.token_feed import NOT_A_NUMBER
from ingot.runtime.beam import top_candidates
from ingot.runtime.log_normaliser import log_normaliser
from ingot.runtime.logits import LogitsProcessor, processors_for
from ingot.runtime.request import Request
from ingot.runtime.sampler import RowSampling, SamplingTensors, logprobs_of, sample
from ingot.structured.grammars import Grammars


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a chosen token under the model itself, and the likeliest tokens as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Choice:
    """What a step gives a request: a token, or candidates for its beam search; ``error``: neither."""

    request: Request
    token_id: int = NOT_A_NUMBER
    logprobs: TokenLogprobs | None = None
    candidates: list[tuple[int, float]] = field(default_factory=list)
    error: RequestError | None = None


class TokenSelector:
    """Keeps each request's logits processors and turns rows of logits into choices."""

    def __init__(
        self,
        stop_ids: frozenset[int],
        vocab_size: int,
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        self._grammars = grammars
        self._stop_ids = stop_ids
        self._vocab_size = vocab_size
        self._device = device
        self._processors: dict[str, list[LogitsProcessor]] = {}

    def needs_host(self, request: Request) -> bool:
        """Whether the request's next token depends on more than its logits and the values of its draw, or
        more than a token is wanted.
        """
        params = request.params
        return params.num_beams > 1 or params.logprobs is not None or bool(self._processors_of(request))

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request."""
        self._processors.pop(request.request_id, None)

    @torch.inference_mode()
    def select(
        self, requests: Sequence[Request], logits: torch.Tensor, num_candidates: int = 0
    ) -> list[Choice]:
        """One choice a row of ``logits`` [B, vocab_size]; rows of beam requests get ``num_candidates``
        tokens.
        """
        choices = [Choice(request) for request in requests]
        beams = [i for i, r in enumerate(requests) if r.params.num_beams > 1]
        rows = logits
        if beams or any(self._processors_of(r) for r in requests):  # rows will change
            rows = logits.float() if logits.dtype != torch.float32 else logits.clone()
        if beams:
            rows[beams] = (rows[beams] - log_normaliser(rows[beams])).float()
        raw = self._raw_rows(requests, rows)
        for row, choice in zip(rows, choices, strict=True):
            try:
                for processor in self._processors_of(choice.request):
                    processor(row, choice.request.output_ids)
            except RequestError as error:
                choice.error = error
        if beams:
            for i, found in zip(beams, top_candidates(rows[beams], num_candidates), strict=True):
                choices[i].candidates = found
        if len(beams) < len(requests):
            self._sample(choices, rows, raw)
        return choices

    def _raw_rows(self, requests: Sequence[Request], rows: torch.Tensor) -> torch.Tensor | None:
        """The rows before processors change them, when some request wants log-probabilities."""
        if all(r.params.logprobs is None for r in requests):
            return None
        changed = any(self._processors_of(r) for r in requests)
        return rows.clone() if changed else rows.float()

    def _sample(self, choices: list[Choice], rows: torch.Tensor, raw: torch.Tensor | None) -> None:
        tensors = SamplingTensors.from_rows([row_sampling(c.request) for c in choices], self._device)
        output = sample(rows, tensors)
        if raw is not None:
            count = max(c.request.params.logprobs or 0 for c in choices)
            chosen, top_ids, top = (t.tolist() for t in logprobs_of(raw, output.token_ids, count))
        both = torch.stack([output.token_ids.double(), output.values.double()])
        tokens, logits = both.tolist()  # one wait for the device
        for i, (choice, token, logit) in enumerate(zip(choices, map(int, tokens), logits, strict=True)):
            choice.token_id = NOT_A_NUMBER if math.isnan(logit) else token
            wanted = choice.request.params.logprobs
            if raw is not None and wanted is not None:
                pairs = tuple(zip(top_ids[i][:wanted], top[i][:wanted], strict=True))
                choice.logprobs = TokenLogprobs(token, chosen[i], pairs)

    def _processors_of(self, request: Request) -> list[LogitsProcessor]:
        found = self._processors.get(request.request_id)
        if found is None:
            found = processors_for(
                request.params, request.prompt_ids, self._stop_ids, self._vocab_size, self._device
            )
            if request.params.grammar is not None and self._grammars is not None:
                found.append(self._grammars.matcher(request.params, self._stop_ids))
            self._processors[request.request_id] = found
        return found


def not_a_number(request: Request) -> EngineError:
    """The error for a model that gives no numbers."""
    return EngineError(
        "the model's logits are not numbers (NaN)",
        seen=f"NaN after {request.num_known} tokens",
        fix="build with --dtype bf16 or fp32 if fp16 overflows; otherwise the weights are broken",
    )


def row_sampling(request: Request) -> RowSampling:
    """How the request draws its next token: a pure function of its seed, answer index and output length."""
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
    )
