"""Draws each row's next token: temperature, top-k, top-p, min-p.

A draw is a pure function of the row's logits, values, seed and step: probabilities become integers before
they are summed, and integer sums do not depend on their order, so neither the other rows of the batch nor a
preemption changes the token. Between devices the last bit of a float64 ``exp`` may differ, which moves a
token's weight by 2**-40 of the likeliest one's at most. On a GPU the kernels of ``ingot.kernels.sampling``
draw, elsewhere the PyTorch reference here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ingot.config.step_sizes import LOGITS_AT_ONCE
from ingot.kernels.kernel_checks import runs_on_gpu
from ingot.kernels.sampling.timestamp_rules import TranscriptRows, hold_transcripts
from ingot.kernels.sampling.token_draw import draw, greedy, greedy_reference
from ingot.kernels.sampling.token_penalties import penalize
from ingot.runtime.sampling.log_normaliser import WEIGHT_ONE
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.sampling.transcript_masks import Transcripts

_SCAN_BLOCK = 512
_FLOAT32_MAX = torch.finfo(torch.float32).max
# A row's values on the device; rules are used by rows with a slot alone.
DRAW_LONGS, DRAW_DOUBLES = ("top_k", "seed", "step"), ("temperature", "top_p", "min_p")
RULES = ("slot", "mask", "transcript", "probed")  # -1: a row does without
ROW_LONGS = (*DRAW_LONGS, *RULES, "min_new", "biased", "last_time", "paired")
ROW_DOUBLES = (*DRAW_DOUBLES, "repetition", "presence", "frequency")


class RowSampling(NamedTuple):
    """How one row draws. ``temperature=0`` is greedy, ``top_k=0`` keeps all.

    ``seed`` is any int64; ``step`` counts the tokens that the request has generated. ``slot``: the request's
    row of the token counts; -1: it has no penalties, no bias (of ``biased`` tokens), and no end tokens that
    are banned before ``min_new``. ``mask``: row of the step's masks; -1: every token is allowed.
    ``transcript``, ``last_time`` and ``paired``: its ``Mark``; -1: it is no transcript. ``logprobs``: it
    wants log-probabilities, with ``likeliest`` those of other tokens too. ``probed``: the token that they are
    of, in a row that draws nothing; -1: of the drawn one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_new: int = 0
    biased: int = 0
    logprobs: bool = False
    likeliest: bool = False
    # What changes from step to step.
    step: int = 0
    slot: int = -1
    mask: int = -1
    transcript: int = -1
    last_time: int = -1
    paired: int = 0
    probed: int = -1


class Newest(NamedTuple):
    """Each row's newest token is ``ids[places]``, both int64 on the device."""

    ids: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class SamplingTensors:
    """The values of B rows on the device, and what the batch lets the sampler skip.

    Attributes:
        temperature, top_p, min_p, repetition, presence, frequency: [B] float64.
        top_k, seed, step, min_new, slot, biased, mask, transcript, last_time, paired, probed: [B] int64.
        max_top_k: largest top_k of a drawing row, 0 where none filters.
        any_top_p, any_min_p: of the drawing rows.
        any_rules: some row has a slot.
        any_likeliest: some row wants log-probabilities of top tokens, too.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    step: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    min_new: torch.Tensor
    slot: torch.Tensor
    biased: torch.Tensor
    mask: torch.Tensor
    transcript: torch.Tensor
    last_time: torch.Tensor
    paired: torch.Tensor
    probed: torch.Tensor
    all_greedy: bool
    max_top_k: int
    any_top_p: bool
    any_min_p: bool
    any_rules: bool
    any_masks: bool
    any_transcripts: bool
    any_probes: bool
    any_logprobs: bool
    any_likeliest: bool

    @classmethod
    def from_rows(cls, rows: Sequence[RowSampling], device: torch.device | str) -> SamplingTensors:
        """Two copies to the device, from pinned memory for a GPU; neither waits."""
        numbers = [[getattr(r, name) for r in rows] for name in ROW_DOUBLES]
        integers = [[getattr(r, name) for r in rows] for name in ROW_LONGS]
        pinned = torch.device(device).type == "cuda"
        host_f = torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned)
        host_i = torch.tensor(integers, dtype=torch.int64, pin_memory=pinned)
        sent = (*host_f.to(device, non_blocking=True), *host_i.to(device, non_blocking=True))
        return cls.over(dict(zip(ROW_DOUBLES + ROW_LONGS, sent, strict=True)), rows)

    @classmethod
    def over(cls, fields: Mapping[str, torch.Tensor], rows: Sequence[RowSampling]) -> SamplingTensors:
        """Values that are on the device already; ``rows`` are the same on the host."""
        drawing = [r for r in rows if r.temperature > 0]
        return cls(
            **fields,
            all_greedy=not drawing,
            max_top_k=max((r.top_k for r in drawing), default=0),
            any_top_p=any(r.top_p < 1 for r in drawing),
            any_min_p=any(r.min_p > 0 for r in drawing),
            any_rules=any(r.slot >= 0 for r in rows),
            any_masks=any(r.mask >= 0 for r in rows),
            any_transcripts=any(r.transcript >= 0 for r in rows),
            any_probes=any(r.probed >= 0 for r in rows),
            any_logprobs=any(r.logprobs for r in rows),
            any_likeliest=any(r.likeliest for r in rows),
        )

    def held(self, logits: torch.Tensor, transcripts: Transcripts, newest: Newest) -> torch.Tensor:
        """Logits [B, V] after the rules of their transcripts, float32."""
        marks = (self.transcript, self.last_time, self.paired)
        return hold_transcripts(logits, transcripts.tables, TranscriptRows(*marks, *newest))

    def penalized(self, logits: torch.Tensor, counts: TokenCounts) -> torch.Tensor:
        """Logits [B, V] after their rows' penalties, float32."""
        rules = (self.repetition, self.presence, self.frequency, self.min_new, self.step)
        return penalize(logits, counts.table, self.slot, *rules, counts.bias, self.biased)


@dataclass(frozen=True)
class SamplerOutput:
    """The chosen tokens, on the logits' device.

    Attributes:
        token_ids: [B] int64.
        values: [B] float32, their logits as given; NaN where the best logit of a row is.
    """

    token_ids: torch.Tensor
    values: torch.Tensor


def sample(logits: torch.Tensor, tensors: SamplingTensors) -> SamplerOutput:
    """Choose a token for each row of ``logits`` ([B, V], processed by the rows' rules; unchanged).

    Greedy rows take the highest score, the lowest id among equals. Other rows scale by temperature, filter by
    top-k, top-p, then min-p (``token_weights``), and take the first token, in id order, at which the running
    sum of weights passes u * total, with u = ``uniform(seed, step)``. A row that is -inf throughout gives 0.
    Logits may be fp16, bf16 or float32: the result is that of their float32 values. Nothing waits for the
    device and every shape depends on B and V alone, so a CUDA graph can hold it; on a GPU the launches depend
    only on B, V, ``all_greedy`` and whether any row has a top-k or a top-p.
    """
    if not runs_on_gpu(logits):
        return sample_reference(logits, tensors)
    if tensors.all_greedy:
        return SamplerOutput(*greedy(logits))
    t, select = tensors, bool(tensors.max_top_k) or tensors.any_top_p
    return SamplerOutput(*draw(logits, t.temperature, t.top_k, t.top_p, t.min_p, t.seed, t.step, select))


def sample_reference(logits: torch.Tensor, tensors: SamplingTensors) -> SamplerOutput:
    """``sample`` in PyTorch, on any device."""
    token_ids, values = greedy_reference(logits)
    if tensors.all_greedy:
        return SamplerOutput(token_ids, values)
    uniforms = uniform(tensors.seed, tensors.step)
    rows = max(1, LOGITS_AT_ONCE // logits.shape[1])
    drawn = [
        _draw(_weights(logits[i : i + rows].float(), tensors, slice(i, i + rows)), uniforms[i : i + rows])
        for i in range(0, logits.shape[0], rows)
    ]
    token_ids = torch.where(tensors.temperature > 0, torch.cat(drawn), token_ids)
    return SamplerOutput(token_ids, logits.gather(1, token_ids[:, None]).squeeze(1).float())


def token_weights(logits: torch.Tensor, tensors: SamplingTensors) -> torch.Tensor:
    """What ``sample`` draws from: [B, V] int64 weights, proportional to the remaining probabilities.

    The likeliest token weighs 2**40; less likely than 2**-40 of it counts as impossible, as does NaN. Filters
    follow Hugging Face's warpers, in their order: top-k keeps every token that ties with the k-th; top-p the
    smallest set whose mass reaches p, lowest ids first among equals, one token at least; min-p those of at
    least min_p times the highest probability. Greedy rows get the weights of temperature 1.
    """
    return _weights(logits.float(), tensors, slice(None))


def _weights(logits: torch.Tensor, tensors: SamplingTensors, rows: slice) -> torch.Tensor:
    scores = torch.nan_to_num(logits, nan=-torch.inf, posinf=_FLOAT32_MAX, neginf=-torch.inf)
    highest = scores.amax(dim=-1, keepdim=True).clamp_min(-_FLOAT32_MAX)  # an all -inf row weighs nothing
    temperature = tensors.temperature[rows, None]
    scaled = scores.double().sub_(highest).div_(torch.where(temperature > 0, temperature, 1.0))
    weights = scaled.exp_().mul_(WEIGHT_ONE).long()  # [rows, V]
    if tensors.max_top_k:
        top_k = tensors.top_k[rows, None]
        best = torch.topk(scores, min(tensors.max_top_k, scores.shape[1]), dim=-1).values
        kth = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1))
        weights.masked_fill_(scores < torch.where(top_k > 0, kth, -torch.inf), 0)
    if tensors.any_top_p:
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        ranked = weights.gather(1, order)
        reached, top_p = _running_sum(ranked), tensors.top_p[rows, None]
        limit = torch.where(top_p < 1, top_p, torch.inf) * reached[:, -1:].double()
        before = reached[:, : ranked.shape[1]] - ranked  # weight of the likelier tokens
        ranked.masked_fill_(before.double() >= limit, 0)
        weights = torch.empty_like(weights).scatter_(1, order, ranked)
    if tensors.any_min_p:
        floor = (tensors.min_p[rows, None] * WEIGHT_ONE).long()
        weights.masked_fill_(weights < floor, 0)
    return weights


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[rows] token ids: inverse transform sampling over integer weights."""
    reached = _running_sum(weights)
    total = reached[:, -1]
    target = torch.minimum((uniforms * total.double()).long(), total - 1)  # rounding may reach the total
    return torch.searchsorted(reached, target[:, None], right=True).squeeze(1)


def _running_sum(weights: torch.Tensor) -> torch.Tensor:
    """Cumulative sum of each row, the total repeated up to a multiple of the block.

    In two levels, blocks and their ends: torch scans a row in one thread block, which idles most of a GPU.
    """
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _SCAN_BLOCK))
    sums = padded.unflatten(1, (-1, _SCAN_BLOCK)).cumsum(dim=-1)  # [rows, blocks, block]
    block_sums = sums[:, :, -1]
    return sums.add_((block_sums.cumsum(dim=-1) - block_sums)[:, :, None]).flatten(1)


_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniform(seed: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """[B] float64 in [0, 1), a multiple of 2**-53: number ``step`` of the stream of ``seed``, both [B] int64.

    The stream is SplitMix64 begun at the hash of ``seed``, so that neighbouring seeds share no numbers.
    """
    bits = splitmix64(splitmix64(seed) + step * _GAMMA)
    return _shift_right(bits, 11).double() * 2.0**-53


def splitmix64(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output for ``state``: int64 in and out, arithmetic modulo 2**64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    z = state + _GAMMA
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts in zeros: torch has no unsigned shift, and its own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
