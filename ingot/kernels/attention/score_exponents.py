"""What attention kernels have in common: scores as exponents of 2, their softcap (Gemma-2: cap · tanh(score /
cap), before the mask), and the attention of the PyTorch references.

    weight = tl.exp2(score * LOG2_E - top)    # top starts at LEAST_SCORE
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
_SCORES = 1 << 22  # held at once by the reference with a softcap
LEAST_SCORE = tl.constexpr(-1.0e38)  # finite, so that exp2(masked - running maximum) is 0, never NaN


@triton.jit
def softcapped(scores: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """cap · tanh(score / cap) as exponents of 2; ``scores`` and CAP are as ``score_factors`` makes them."""
    return CAP - 2.0 * CAP / (1.0 + tl.exp2(scores))


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What a kernel multiplies query·key by, and its constant CAP (0: none).

    tanh(y) = 1 - 2 / (1 + exp(2 y)), so a capped score is at first 2 score / cap as an exponent of 2.
    """
    if not softcap:
        return scale * LOG2_E, 0.0
    return scale * 2 * LOG2_E / softcap, softcap * LOG2_E


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """Reference attention of [..., G, n, D] over [..., G or 1, S, D]; ``mask`` [n, S] bool is true for keys
    that are seen, ``causal`` stands for the mask of n = S. With a softcap some queries at a time.
    """
    if not softcap:
        wide = (*query.shape[:-2], *key.shape[-2:])
        return torch.nn.functional.scaled_dot_product_attention(
            query, key.expand(wide), value.expand(wide), attn_mask=mask, is_causal=causal, scale=scale
        )
    out = torch.empty_like(query)
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = key.to(dtype), value.to(dtype)
    shared = key.shape[-3] < query.shape[-3]  # by the queries of a group, which become rows
    if shared:
        key, value = key.squeeze(-3), value.squeeze(-3)
    tokens = torch.arange(key.shape[-2], device=query.device)
    rows = capped_rows(query[..., 0, 0].numel(), key.shape[-2])
    for first in range(0, query.shape[-2], rows):
        piece = query[..., first : first + rows, :].to(dtype)
        flat = piece.flatten(-3, -2) if shared else piece
        scores = (flat @ key.transpose(-2, -1)).mul_(scale / softcap).tanh_().mul_(softcap)
        seen = tokens <= tokens[first : first + rows, None] if causal else None
        seen = mask[first : first + rows] if mask is not None else seen
        if seen is not None:
            scores.view(*piece.shape[:-1], -1).masked_fill_(~seen, -math.inf)
        scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
        attended = (scores @ value).div_(scores.sum(dim=-1, keepdim=True))
        out[..., first : first + rows, :] = attended.view(piece.shape)
    return out


def capped_rows(heads: int, tokens: int) -> int:
    """Queries of ``heads`` over ``tokens`` that the reference with a softcap takes at once."""
    return max(_SCORES // (heads * tokens), 1)
