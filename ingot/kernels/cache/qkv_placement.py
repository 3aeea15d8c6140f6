"""Where a QKV product's heads go and how they are rotated: arguments of kernels before attention.

place = Placement(table, TokenPlaces(rope_rows, positions, slots), cache, QkvHeads(32, 8, 128))
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_group, expect_range

MAX_HEAD_DIM = 256


class TokenPlaces(NamedTuple):
    """Where each of T tokens is; the same for every layer of a step.

    Attributes:
        rope_rows: [T] int64, rows of the rotary table.
        positions: [T] int64, 0-based position in the request; read for logn only.
        slot_mapping: [T] int64, ``block * block_size + offset``; -1 writes nothing.
    """

    rope_rows: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


class QkvHeads(NamedTuple):
    """The heads of a layer's QKV product: queries, keys, values in this order.

    Attributes:
        num_heads: query heads; 0: keys and values alone are placed.
        head_dim: channels per head, at most 256.
        logn_length: the trained length in tokens; 0: queries are not scaled by logn.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    logn_length: int = 0

    @property
    def width(self) -> int:
        """Columns of the product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def expect(self) -> None:
        """Raise unless a kernel can take such heads."""
        expect_group(self.num_heads or self.num_kv_heads, self.num_kv_heads)
        expect_range("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        if self.logn_length == 1:
            raise KernelArgumentError("logn_length is out of range", seen=1, allowed="0 (off) or 2 and more")
        expect_range("logn_length", self.logn_length, 0)


class HeadNorms(NamedTuple):
    """RMSNorm of each query and key head: weights [head_dim] in the heads' dtype, or both in fp32; ``eps`` is
    added to the mean square.
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: float

    def expect(self, head_dim: int, like: torch.Tensor) -> None:
        """Raise unless a kernel can norm heads like ``like`` by them."""
        wide = torch.float32 if self.q.dtype == torch.float32 else None
        for name, weight in (("q_norm_weight", self.q), ("k_norm_weight", self.k)):
            expect(name, weight, (head_dim,), like=like, dtype=wide)


class Placement(NamedTuple):
    """Where a layer's queries, keys and values go.

    Attributes:
        cos_sin: [rows, rotary_dim] fp32, cosines then sines, rotary_dim even and at most head_dim; None: no
            rotary embedding.
        cache: receives keys and values.
    """

    cos_sin: torch.Tensor | None
    tokens: TokenPlaces
    cache: PagedCache
    heads: QkvHeads

    @property
    def half(self) -> int:
        """Rotated pairs of channels."""
        return 0 if self.cos_sin is None else self.cos_sin.shape[1] // 2

    def expect(self, num_tokens: int, like: torch.Tensor) -> None:
        """Raise unless a kernel can take it for ``num_tokens`` rows like ``like``; not the heads."""
        head_dim = self.heads.head_dim
        for name, indices in zip(TokenPlaces._fields, self.tokens, strict=True):
            expect(name, indices, (num_tokens,), like=like, dtype=torch.int64)
        self.cache.expect(self.heads.num_kv_heads, head_dim, like)
        if self.cos_sin is not None:
            expect("cos_sin", self.cos_sin, (None, None), like=like, dtype=torch.float32)
            width = self.cos_sin.shape[1]
            if width % 2 or not 2 <= width <= head_dim:
                what = "rotary_dim, the width of cos_sin, does not fit"
                raise KernelArgumentError(what, seen=width, allowed=f"even, 2 to {head_dim}")
