"""A row of logits under a request's rules, by the usual path.

penalized(params, prompt_ids, output_ids, stop_ids, row)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.sampling.sampler import SamplingTensors
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.scheduling.request import Request
from ingot.runtime.selection import TokenSelector


def penalized(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_ids: frozenset[int],
    row: torch.Tensor,
) -> torch.Tensor:
    """What ``row`` ([V] float32) becomes before the next token is chosen, from a fresh start."""
    counts = TokenCounts(1, len(row), len(output_ids) + 1, row.device)
    request = Request("r", list(prompt_ids), params, 0, output_ids=list(output_ids))
    return under_rules(TokenSelector(stop_ids, counts), counts, [request], row[None])[0]


def under_rules(
    selector: TokenSelector, counts: TokenCounts, requests: Sequence[Request], rows: torch.Tensor
) -> torch.Tensor:
    """Rows of logits under the rules of a request each."""
    tensors = SamplingTensors.from_rows(selector.draws(requests, counted=False), rows.device)
    return tensors.penalized(rows, counts) if tensors.any_rules else rows.clone()
