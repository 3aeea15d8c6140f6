"""What attention over a paged cache takes beside queries and cache, in groups, and its checks.

out = paged_attention(q, cache, Sequences(block_tables, seq_lens, 4096), Scoring(128**-0.5))
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ingot.kernels.attention.int8_heads import OutScales
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect,
    expect_float,
    expect_group,
    expect_range,
)


class Sequences(NamedTuple):
    """Which keys a step's queries see; the same for every layer.

    Attributes:
        block_tables: [B, max_blocks] int32; entries past a request's length are not read.
        seq_lens: [B] int32, keys per request; 0 marks a padding row, whose output is zeros.
        max_seq_len: an upper bound on seq_lens; sizes the launch, does not change the result.
        query_start: [B + 1] int32: request b has the rows ``query_start[b] : query_start[b + 1]`` of q; None:
            one row each.
        max_query_len: an upper bound on the new tokens of a request.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    query_start: torch.Tensor | None = None
    max_query_len: int = 1


class Scoring(NamedTuple):
    """How a layer scores a key.

    Attributes:
        scale: usually head_dim ** -0.5.
        window: keys that a query sees, its own included; 0: all.
        softcap: > 0: scores become softcap · tanh(score / softcap).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


class AttentionOutput(NamedTuple):
    """Where an output goes, and in which form.

    Attributes:
        out: [T, num_heads, head_dim] contiguous, or None for a new tensor; int8 if the output is quantized.
        scales: None: the output is in the dtype of q; ``OperandOrder``: the same, columns reordered. Of a
            quantized output fp32 [T, num_heads], which receives each head's scale; fp32 [1], a static scale;
            or ``BlockSteps``.
        steady: the output will be quantized. The reference then sums in float64: the last bits of fp32 sums
            depend on the shape of the step, and rounding can magnify them. Kernels ignore it.
    """

    out: torch.Tensor | None = None
    scales: OutScales | None = None
    steady: bool = False


PLAIN_OUTPUT = AttentionOutput()  # a new tensor in the dtype of q


class TileList(NamedTuple):
    """What the programs of prefill attention compute, in order.

    Attributes:
        tiles: [N, 4] int32: a request, which BLOCK_M of its queries, which part of their keys, of how many
            parts; NO_TILE instead of a tile: nothing. The list holds all tiles of the last requests, from
            some request on, parts one after another; rows of other requests are left as they are.
        parts: entries, the first ones, that may be of tiles in several parts; 0: none. Such tiles differ from
            whole ones in the last bits.
    """

    tiles: torch.Tensor
    parts: int = 0


def expect_attention(
    q: torch.Tensor, cache: PagedCache, sequences: Sequences, scoring: Scoring, batch: int | None = None
) -> None:
    """Raise unless a kernel can take these; ``batch`` None: as many requests as in ``seq_lens``."""
    expect_float("q", q)
    expect("q", q, (None, None, None), like=q)
    expect_range("head_dim", q.shape[2], 8, 256)
    if q.shape[1] > 1 and q.stride(1) != q.shape[2]:
        what = "q is not contiguous within a row"
        raise KernelArgumentError(what, seen=q.stride(), fix="call .contiguous() first")
    cache.expect(None, q.shape[2], like=q)
    expect_group(q.shape[1], cache.num_kv_heads)
    seq_lens = sequences.seq_lens
    if batch is None:
        batch = seq_lens.shape[0] if seq_lens.dim() else 0
    expect("seq_lens", seq_lens, (batch,), like=q, dtype=torch.int32)
    expect("block_tables", sequences.block_tables, (batch, None), like=q, dtype=torch.int32)
    expect_range("max_seq_len", sequences.max_seq_len, 0)
    expect_range("window", scoring.window, 0)
    if not 0 <= scoring.softcap < math.inf:
        what = "softcap is out of range"
        raise KernelArgumentError(what, seen=scoring.softcap, allowed="0 for none, or positive")


def expect_queries(q: torch.Tensor, sequences: Sequences) -> None:
    """Raise unless ``query_start`` and ``max_query_len`` are there and fit."""
    start = sequences.query_start
    if start is None:
        raise KernelArgumentError("query_start is missing", seen=None, allowed="[B + 1] int32")
    expect("query_start", start, (len(sequences.seq_lens) + 1,), like=q, dtype=torch.int32)
    expect_range("max_query_len", sequences.max_query_len, 0)


def expect_arrivals(arrivals: torch.Tensor | None, q: torch.Tensor, least: int) -> None:
    """Raise unless ``arrivals`` is None or has at least so many counts."""
    if arrivals is not None:
        expect("arrivals", arrivals, (None,), like=q, dtype=torch.int32)
        expect_range("arrivals", arrivals.numel(), least)
