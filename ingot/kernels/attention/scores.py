"""What every attention kernel takes a score to be: an exponent of 2, finite even where it is masked.

Owns that unit, the softcap of scores (Gemma-2: cap · tanh(score / cap), before the mask) and the attention of
the PyTorch twins.

    weight = tl.exp2(score * LOG2_E - top)    # top starts at LEAST_SCORE
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
_SCORES = 1 << 22  # that a twin with a softcap holds at once
LEAST_SCORE = tl.constexpr(-1.0e38)  # finite, so that exp2(masked - running maximum) is 0 and never NaN


@triton.jit
def softcapped(scores: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """cap · tanh(score / cap) as exponents of 2; ``scores`` and CAP are as ``score_factors`` makes them."""
    return CAP - 2.0 * CAP / (1.0 + tl.exp2(scores))


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What a kernel multiplies query·key by, and its constant CAP; 0: scores have no cap.

    tanh(y) = 1 - 2 / (1 + exp(2 y)), so a capped score is 2 score / cap in exponents of 2 at first.
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
    """The twins' attention of [..., n, D] over [..., S, D]; ``mask`` [n, S] bool is what is seen, and
    ``causal`` the mask of n = S.
    """
    own = query.dtype
    if not softcap:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale
        )
    dtype = torch.promote_types(own, torch.float32)
    query, key, value = (part.to(dtype) for part in (query, key, value))
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    heads = query[..., 0, 0].numel()
    pieces = query.split(max(_SCORES // (heads * key.shape[-2]), 1), dim=-2)
    masks = [None] * len(pieces) if mask is None else mask.split(pieces[0].shape[-2])
    found = [
        _capped(piece, key, value, scale, softcap, seen) for piece, seen in zip(pieces, masks, strict=True)
    ]
    return torch.cat(found, dim=-2).to(own)


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    scores = (query @ key.transpose(-2, -1)).mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    return scores.softmax(dim=-1) @ value
