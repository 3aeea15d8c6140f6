"""Steps of rope_kv_write.py's kernel, each for some channels of some heads: load, normalise, measure, store.

store_heads(x, cols, inside, places, stored, inverse, NARROW)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ingot.kernels.rows.int8_round import as_wide, numbers_of


@dataclass(frozen=True, slots=True)
class QkvParts:
    """A QKV product [T, width] in S partial sums.

    Attributes:
        parts: fp32 [S, T, width], contiguous.
        bias: [width], or None.
        dtype: fp16, bf16 or fp32, to which the sum with the bias is rounded.
    """

    parts: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    def product(self) -> torch.Tensor:
        """The product, in plain PyTorch."""
        whole = self.parts.sum(dim=0)
        return (whole if self.bias is None else whole + self.bias.float()).to(self.dtype)


class Roles(NamedTuple):
    """For each role of a head: pointers [H, 1] where it would be stored, or masks [H, 1] of heads with it."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor


@triton.jit
def head_columns(
    base: tl.tensor,
    bias: tl.tensor,
    part_stride: tl.tensor,
    cols: tl.tensor,
    mask: tl.tensor,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Channels ``cols`` of heads at ``base`` [H, 1] in fp32; with PARTS summed, with bias, rounded to
    DTYPE.
    """
    if PARTS == 0:
        x = tl.load(base + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        x = tl.zeros(mask.shape, dtype=tl.float32)
        for part in tl.static_range(PARTS):
            x += tl.load(base + part * part_stride + cols[None, :], mask=mask, other=0.0)
        if bias is not None:
            x += tl.load(bias + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def normed(
    x: tl.tensor,
    rstd: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    cols: tl.tensor,
    inside: tl.tensor,
    is_q: tl.tensor,
    is_v: tl.tensor,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """``cast(x * rstd) * weight`` for query and key heads, x for value heads; fp32, rounded to DTYPE. With
    weights in fp32 beside a 16-bit DTYPE the first cast is left out.
    """
    q_weight = tl.load(q_norm_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])
    WIDE: tl.constexpr = q_norm_ptr.dtype.element_ty == tl.float32
    y = x * rstd[:, None]
    if not WIDE:
        y = y.to(DTYPE).to(tl.float32)
    y = (y * weight).to(DTYPE).to(tl.float32)
    return tl.where(is_v[:, None], x, y)


@triton.jit
def largest(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The largest magnitude of each head's channels [H, C], rounded to DTYPE; fp32."""
    return tl.max(tl.abs(x.to(DTYPE).to(tl.float32)), axis=1)


@triton.jit
def store_heads(
    x: tl.tensor,
    cols: tl.tensor,
    inside: tl.tensor,
    places: Roles,
    stored: Roles,
    inverse: tl.tensor,
    NARROW: tl.constexpr,
) -> None:
    """Store channels ``cols`` of each head by role: query output, key cache or value cache.

    NARROW: keys and values are multiplied by their heads' ``inverse`` and stored in 8 bits.
    """
    dtype: tl.constexpr = places.q.dtype.element_ty
    x = x.to(dtype)
    keys, values = places.k + cols[None, :], places.v + cols[None, :]
    kept = x
    if NARROW:
        kept = numbers_of(x.to(tl.float32), inverse[:, None], places.k.dtype.element_ty)
        keys, values = as_wide(keys, dtype), as_wide(values, dtype)
    tl.store(keys, kept, mask=stored.k & inside[None, :])
    tl.store(values, kept, mask=stored.v & inside[None, :])
    # Queries last: after them the compiler cannot lay out values of a partly rotated fp32 head (3.6, 3.7).
    tl.store(places.q + cols[None, :], x, mask=stored.q & inside[None, :])
