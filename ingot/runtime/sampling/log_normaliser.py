"""log(sum(exp(logits))) of a row, with a sum that does not depend on the rows beside it."""

from __future__ import annotations

import torch

from ingot.config.step_sizes import LOGITS_AT_ONCE
from ingot.kernels.cpu.log_sums import exp_sums, has_exp_sums

WEIGHT_ONE = 2.0**40  # weight of a row's likeliest token; V < 2**22 keeps their sum an int64


def log_normaliser(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits))) of each row: [B, V] floating, V < 2**22 → [B, 1] float64.

    Weights are rounded to 2**-40 of the likeliest token's and summed as integers: within V 2**-41 of the
    exact result. NaN where a row has one, else inf where it has one, -inf where it has nothing else.
    """
    rows = max(1, LOGITS_AT_ONCE // max(logits.shape[1], 1))
    if len(logits) <= rows:
        return _of_rows(logits)
    return torch.cat([_of_rows(part) for part in logits.split(rows)])


def _of_rows(logits: torch.Tensor) -> torch.Tensor:
    if has_exp_sums(logits):
        most = logits.amax(dim=-1)
        highest, total = most.double()[:, None], exp_sums(logits, most)[:, None]
    else:
        wide = logits.double()
        highest = wide.amax(dim=-1, keepdim=True)
        total = (wide - highest).exp_().mul_(WEIGHT_ONE).round_().long().sum(dim=-1, keepdim=True)
    return torch.where(highest.isfinite(), highest + (total.double() / WEIGHT_ONE).log(), highest)
