"""What attention over a paged cache takes beside queries and cache, in groups, and the checks of all of it.

Owns the groups: of a step (``Sequences``), of a layer (``Scoring``), of an output, and of a captured step's
tiles. Knows no kernel.

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
    expect_heads,
    expect_range,
)


class Sequences(NamedTuple):
    """Which keys a step's queries see; the same for every layer.

    Attributes:
        block_tables: [B, max_blocks] int32; entries past a request's length are not read.
        seq_lens: [B] int32, keys of each request; 0 is a padding row: its output is zeros.
        max_seq_len: an upper bound on seq_lens; sizes the launch, does not change the result.
        query_start: [B + 1] int32: request b's queries are the rows ``query_start[b] : query_start[b + 1]``
            of q; None: each request has one.
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
        scale: multiplies the scores, usually head_dim ** -0.5.
        window: keys that a query sees, itself included; 0: all.
        softcap: > 0: scores become softcap · tanh(score / softcap).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


class AttentionOutput(NamedTuple):
    """Where an output goes, and in which form.

    Attributes:
        out: [T, num_heads, head_dim] contiguous, or None for a new tensor; int8 with ``scales``.
        scales: fp32 [T, num_heads], receives the scale of each head of an output in 8 bits, or [1], the
            static scale of all, or the steps of its blocks (int8_heads.py); None: it is in the dtype of q, as
            with ``OperandOrder``, which puts each row's columns in another order.
        steady: the output will be rounded to few bits. The reference then sums in float64: the last bits of
            fp32 sums follow the shape of the step, and rounding can make a quantum of them. Kernels ignore
            it.
    """

    out: torch.Tensor | None = None
    scales: OutScales | None = None
    steady: bool = False


PLAIN_OUTPUT = AttentionOutput()  # a new tensor in the dtype of q


class TileList(NamedTuple):
    """What the programs of prefill attention compute, in this order.

    Attributes:
        tiles: [N, 4] int32: a request, which BLOCK_M of its queries, which part of the keys that these see,
            and of how many; NO_TILE of any: nothing. It holds all tiles of the last requests, from some
            request on, and their parts one after another; rows of the others are left as they are.
        parts: only so many entries, the first ones, are of tiles with more than one part; 0: none. Sums of
            parts differ from those of whole tiles in their last bits.
    """

    tiles: torch.Tensor
    parts: int = 0


def expect_attention(
    q: torch.Tensor, cache: PagedCache, sequences: Sequences, scoring: Scoring, batch: int | None = None
) -> None:
    """Raise unless a kernel can take these; ``batch`` None: as many requests as ``seq_lens`` has."""
    expect_float("q", q)
    expect_heads("q", q, like=q)
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
        raise KernelArgumentError(
            "softcap is out of range", seen=scoring.softcap, allowed="0 for none, or positive"
        )


def expect_queries(q: torch.Tensor, sequences: Sequences) -> None:
    """Raise unless ``query_start`` can say where each request's new tokens are."""
    start = sequences.query_start
    if start is None:
        raise KernelArgumentError("query_start is missing", seen=None, allowed="[B + 1] int32")
    expect("query_start", start, (len(sequences.seq_lens) + 1,), like=q, dtype=torch.int32)
    expect_range("max_query_len", sequences.max_query_len, 0, None)


def expect_arrivals(arrivals: torch.Tensor | None, q: torch.Tensor, least: int) -> None:
    """Raise unless ``arrivals`` has room for so many counts."""
    if arrivals is not None:
        expect("arrivals", arrivals, (None,), like=q, dtype=torch.int32)
        expect_range("arrivals", arrivals.numel(), least)
