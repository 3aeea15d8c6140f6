"""From a step's logits to each request's next token: penalties, processors, masks, sampling, beams."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.errors import EngineError, RequestError
from ingot.kernels.sampling.feed_tokens import NOT_A_NUMBER
from ingot.kernels.sampling.masked_tokens import mask_tokens
from ingot.runtime.sampling.grammar_masks import GrammarMasks, TokenMasks
from ingot.runtime.sampling.log_normaliser import log_normaliser
from ingot.runtime.sampling.sampler import Newest, RowSampling, SamplingTensors, sample
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.sampling.token_logprobs import (
    NARROW_WIDTH,
    ROW_WIDTH,
    TokenLogprobs,
    leave_logprobs,
    read_logprobs,
)
from ingot.runtime.sampling.transcript_masks import Mark, Transcripts
from ingot.runtime.scheduling.beam import top_candidates
from ingot.runtime.scheduling.request import Request
from ingot.runtime.step.sampled_step import leave_row_logprobs

_NO_MARK = Mark(-1, -1, 0)
_RULES = slice(RowSampling._fields.index("repetition"), RowSampling._fields.index("biased") + 1)
_UNRULED = RowSampling()[_RULES]  # no row of the token counts is needed
Processor = Callable[[list[int], torch.Tensor], torch.Tensor]


@dataclass
class Choice:
    """A request's result of a step: a token, or candidates for its beam search; ``error``: neither."""

    request: Request
    token_id: int = NOT_A_NUMBER
    logprobs: TokenLogprobs | None = None
    candidates: list[tuple[int, float]] = field(default_factory=list)
    error: RequestError | None = None


class TokenSelector:
    """Gives each request's row its values, and turns rows of logits into choices."""

    def __init__(
        self,
        stop_ids: frozenset[int],
        counts: TokenCounts,
        masks: GrammarMasks | None = None,
        transcripts: Transcripts | None = None,
    ) -> None:
        self._stop_ids = stop_ids
        self._counts = counts
        sizes = (counts.max_requests, counts.vocab_size, counts.device)
        self._masks = GrammarMasks(TokenMasks(*sizes)) if masks is None else masks
        self._transcripts = Transcripts(*sizes) if transcripts is None else transcripts

    @staticmethod
    def needs_host(request: Request) -> bool:
        """Whether the host decides what follows the request's logits: beams, logits processors."""
        return request.params.num_beams > 1 or bool(request.params.logits_processors)

    def forget(self, request: Request) -> None:
        """Release what a request holds on the device: it has ended or was preempted."""
        self._counts.release(request)
        self._transcripts.release(request)

    def draws(self, requests: Sequence[Request], *, counted: bool) -> list[RowSampling]:
        """How each request's next token is chosen, once the device holds what is known of its tokens, and the
        masks of grammars.

        ``counted``: by a step that counts the tokens itself (``leave_tokens``).
        """
        given = [request.draw or _keep_draw(request) for request in requests]
        ends = {i: self._banned(requests[i]) for i, draw in enumerate(given) if draw[_RULES] != _UNRULED}
        ruled = [i for i, banned in ends.items() if banned or has_rules(requests[i].params)]
        slots = self._counts.slots([requests[i] for i in ruled], [ends[i] for i in ruled], counted=counted)
        slot_of = dict(zip(ruled, slots, strict=True))
        masks = self._masks.place(requests)
        marks = self._transcripts.marks(requests)
        return [
            row_sampling(request, slot_of.get(i, -1), masks[i], marks[i])
            for i, request in enumerate(requests)
        ]

    @torch.inference_mode()
    def select(
        self, requests: Sequence[Request], logits: torch.Tensor, num_candidates: int = 0
    ) -> list[Choice]:
        """One choice per row of ``logits`` [B, vocab_size]; beams get ``num_candidates`` tokens."""
        choices = [Choice(request) for request in requests]
        tensors = SamplingTensors.from_rows(self.draws(requests, counted=False), self._counts.device)
        beams = [i for i, r in enumerate(requests) if r.params.num_beams > 1]
        bringing = [(i, r) for i, r in enumerate(requests) if r.params.logits_processors]
        if tensors.any_transcripts:
            logits = tensors.held(logits, self._transcripts, _newest(requests, logits.device))
        rows = logits
        if beams or bringing or tensors.any_masks:  # rows will change
            rows = logits.to(torch.float32, copy=True)
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
        return choices

    def _banned(self, request: Request) -> frozenset[int]:
        """End tokens that cannot be the request's next token; a grammar has its own rule."""
        params = request.params
        if params.grammar is not None:
            return frozenset()
        if len(request.output_ids) + request.num_pending >= params.min_new_tokens:
            return frozenset()
        return params.end_ids(self._stop_ids)


def _sample(choices: list[Choice], rows: torch.Tensor, raw: torch.Tensor, tensors: SamplingTensors) -> None:
    """Draw from ``rows``; log-probabilities are of ``raw``, the model's own logits."""
    output = sample(rows, tensors)
    logprobs: list[list[float]] = []
    if tensors.any_logprobs:
        found = torch.empty(len(choices), ROW_WIDTH, dtype=torch.float64, device=raw.device)
        leave_row_logprobs(raw, output.token_ids, tensors, found)
        logprobs = found.tolist()
    both = torch.stack([output.token_ids.double(), output.values.double()])
    tokens, logits = both.tolist()  # one wait for the device
    for i, (choice, token, logit) in enumerate(zip(choices, map(int, tokens), logits, strict=True)):
        choice.token_id = NOT_A_NUMBER if math.isnan(logit) else token
        wanted = choice.request.params.logprobs
        if wanted is not None:
            choice.logprobs = read_logprobs(logprobs[i], token, wanted)


def _newest(requests: Sequence[Request], device: torch.device) -> Newest:
    ids = torch.tensor([request.tokens(request.num_known - 1, request.num_known)[0] for request in requests])
    return Newest(ids.to(device), torch.arange(len(requests), device=device))


def apply_brought(processors: Sequence[Processor], ids: Sequence[int], logits: torch.Tensor) -> None:
    """Apply a request's logits processors to ``logits`` ([V] float32, a view of one row) in place, one after
    another; ``ids`` are the prompt's and the output's.

    Raises:
        RequestError: a function fails, or returns no logits of that shape.
    """
    for processor in processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        try:
            found = processor(list(ids), logits)
        except Exception as error:
            what = f"the logits processor {name} failed"
            raise RequestError(what, seen=repr(error), field="logits_processors") from error
        if not isinstance(found, torch.Tensor) or found.shape != logits.shape:
            seen = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise RequestError(
                f"the logits processor {name} did not return logits",
                seen=seen,
                allowed=f"a tensor {list(logits.shape)}",
                field="logits_processors",
            )
        if found is not logits:
            logits.copy_(found)


@torch.inference_mode()
def take_probes(requests: Sequence[Request], logits: torch.Tensor) -> None:
    """Give requests their probes' log-probabilities, from the probes' rows of logits."""
    if not requests:
        return
    found = torch.empty(len(requests), NARROW_WIDTH, dtype=torch.float64, device=logits.device)
    tokens = [request.probe.token for request in requests if request.probe is not None]
    leave_logprobs(logits, torch.tensor(tokens, device=logits.device), found)
    for request, (value, *_) in zip(requests, found.tolist(), strict=True):
        request.probed = value


def probe_draws(requests: Sequence[Request]) -> list[RowSampling]:
    return [RowSampling(probed=one.probe.token, logprobs=True) for one in requests if one.probe is not None]


def has_rules(params: SamplingParams) -> bool:
    """Whether a request has a bias, or penalizes tokens that it has seen."""
    changed = params.presence_penalty or params.frequency_penalty or params.logit_bias
    return params.repetition_penalty != 1.0 or bool(changed)


def not_a_number(request: Request) -> EngineError:
    return EngineError(
        "the model's logits are not numbers (NaN)",
        seen=f"NaN after {request.num_known} tokens",
        fix="build with `dtype=bf16` or fp32 if fp16 overflows; otherwise the weights are broken",
    )


def ended_early(request: Request) -> EngineError:
    """A mask that was computed and not applied shows here, or where the matcher reads the next token."""
    return EngineError(
        "the answer ended where its grammar cannot end, so the grammar's masks were not applied",
        seen=f"an end token after {len(request.output_ids)} tokens",
        fix="run `ingot verify` on the engine, and report it",
    )


def row_sampling(request: Request, slot: int = -1, mask: int = -1, mark: Mark | None = None) -> RowSampling:
    """How the request draws its next token, with its slot, mask and mark: a pure function of its values, its
    answer index and its output's length.
    """
    step = len(request.output_ids) + request.num_pending
    place, last_time, paired = mark or _NO_MARK
    mine = request.draw or _keep_draw(request)
    values = (*mine, step, slot, mask, place, last_time, paired, -1)
    return tuple.__new__(RowSampling, values)  # half the time of _make


def _keep_draw(request: Request) -> tuple[float | int | bool, ...]:
    """The part of ``RowSampling`` that all tokens of a request share; found once."""
    params, seed = request.params, request.seed
    if request.sample_index:
        seed ^= zlib.crc32(request.sample_index.to_bytes(4, "little")) << 16
    request.draw = (
        params.temperature if params.num_beams == 1 else 0.0, params.top_k, params.top_p, params.min_p, seed,
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty, params.min_new_tokens,
        len(params.logit_bias), params.logprobs is not None, bool(params.logprobs),
    )  # fmt: skip
    return request.draw
