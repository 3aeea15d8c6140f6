"""Log-probabilities of chosen tokens, from a step to its requests.

They travel in one row: the chosen token's, the K = MAX_LOGPROBS largest, and the ids of these; K is the same
for all, so that one CUDA graph serves every request. They are the model's own: of the raw logits, before
penalties, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ingot.config.sampling_params import MAX_LOGPROBS
from ingot.kernels.kernel_checks import runs_on_gpu
from ingot.kernels.sampling.row_logprobs import greedy_logprobs, logprobs
from ingot.kernels.sampling.token_draw import best_tokens, greedy_reference
from ingot.runtime.sampling.log_normaliser import log_normaliser
from ingot.runtime.sampling.sampler import SamplerOutput
from ingot.runtime.scheduling.request import Request

ROW_WIDTH = 1 + 2 * MAX_LOGPROBS
NARROW_WIDTH = 3  # of rows in which the chosen token's alone counts


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a chosen token under the model itself, and the top tokens as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def read_logprobs(row: Sequence[float], token_id: int, wanted: int) -> TokenLogprobs:
    """The ``wanted`` top tokens of a row that ``leave_logprobs`` left, or all there are."""
    if not wanted:
        return TokenLogprobs(token_id, row[0])
    values, ids = row[1 : 1 + wanted], row[1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + wanted]
    top = tuple((int(token), value) for token, value in zip(ids, values, strict=True) if token >= 0)
    return TokenLogprobs(token_id, row[0], top)


def with_probe(request: Request, found: TokenLogprobs | None) -> TokenLogprobs | None:
    """A request's first log-probabilities with its probe before the top tokens."""
    if found is None or request.probe is None or request.output_ids:
        return found
    assert request.probed is not None
    return replace(found, top=((request.probe.token, request.probed), *found.top))


def leave_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Leave the log-probabilities of B rows in ``out[:B]``; nothing waits for the device.

    Args:
        logits: [B, V] floating, as the model gave them.
        token_ids: [B] int64, the chosen tokens.
        out: [at least B, 1 + 2 K] float64, written to: log-probabilities as float32 rounds them, those of the
            row's top tokens largest first and the lowest id first among equals, then their ids, -1 where V <
            K.
    """
    leave = logprobs if runs_on_gpu(logits) else leave_logprobs_reference
    leave(logits, token_ids, out)


def leave_greedy(logits: torch.Tensor, out: torch.Tensor) -> SamplerOutput:
    """Each row's best token, as ``sample`` of greedy rows, and its ``leave_logprobs`` in ``out``."""
    if runs_on_gpu(logits):
        return SamplerOutput(*greedy_logprobs(logits, out))
    chosen = SamplerOutput(*greedy_reference(logits))
    leave_logprobs_reference(logits, chosen.token_ids, out)
    return chosen


def leave_logprobs_reference(logits: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor) -> None:
    """``leave_logprobs`` in PyTorch, on any device; several likeliest row by row, as a CPU's caches hold."""
    top = out.shape[1] // 2
    if top == 1:
        rows = logits.float()
        best = best_tokens(rows)
        chosen = rows.gather(1, torch.stack((token_ids, best), dim=1)).double()
        out[: len(rows), :2] = (chosen - log_normaliser(rows)).float().double()
        out[: len(rows), 2] = best.double()
        return
    for row, token, place in zip(logits.float(), token_ids, out, strict=False):
        likeliest = _likeliest(row, top)
        count = len(likeliest)
        chosen = row[torch.cat([token[None], likeliest])].double()
        place[: 1 + count] = (chosen - log_normaliser(row[None])[0]).float().double()
        place[1 + top :] = -1
        place[1 + top : 1 + top + count] = likeliest.double()


def _likeliest(row: torch.Tensor, count: int) -> torch.Tensor:
    """[up to count] ids of a row's largest logits, the lowest id first among equals (topk takes any)."""
    least = torch.topk(row, min(count, len(row))).values[-1]
    ids = (~(row < least)).nonzero().squeeze(1)  # NaN is above all, as for topk and sort
    return ids[torch.sort(row[ids], descending=True, stable=True).indices[:count]]
