"""Which rows of a step belong to which request, and which are wanted for logits.

Plain numbers, computed once per step on the host: the step's tensors, the buckets of its CUDA graph and the
owner of each row of logits are read from here. It can be pickled, so one process can send it to others.

    layout = StepLayout.of(starts=[8, 0], counts=[1, 5], blocks=[[3, 1], [0, 2]], block_size=8, wanted=[1, 1])
    batch = ForwardBatch.of(layout, device, max_seq_len=4096)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from operator import add
from typing import NamedTuple

import numpy as np


class StepInputs(NamedTuple):
    """What a step reads of its requests' inputs.

    Attributes:
        encoded_tables, encoded_lens: blocks, int32, of each request's input in the encoder cache, and its
            positions; both are empty if no request has one.
        spliced: [T] int64, row of the encoder's outputs that replaces each token's embedding, -1: none.
        brought: embeddings that requests bring, as (request, its input, first position, end).
    """

    encoded_tables: Sequence[np.ndarray] = ()
    encoded_lens: Sequence[int] = ()
    spliced: np.ndarray | None = None
    brought: Sequence[tuple[int, int, int, int]] = ()


NO_INPUTS = StepInputs()
TOKEN_ROWS = ("input_ids", "positions", "rope_rows", "slot_mapping", "feed_rows")


@dataclass(frozen=True, eq=False)
class StepLayout:
    """``T`` rows, one per new token, of ``B`` requests, end to end. Leading requests with one row attend as
    decodes, whatever runs beside them.

    Attributes:
        counts: rows per request.
        wanted: how many of each request's last rows are wanted for logits.
        blocks: cache blocks of each request in order; the scheduler's own lists, which grow with later steps.
        query_start, seq_lens: as of ``ForwardBatch``.
        tokens: [5, T] int64, ``TOKEN_ROWS``: four as of ``ForwardBatch``, where the id of a pending token is
            0; then the row of the last step's tokens that holds a pending token's id, -1: it is known.
        logits_indices: wanted rows, by request; then those of ``num_probes`` probes.
        num_single: leading requests with one row.
        num_probes: requests whose probed row the step computes; one more row of logits each.
    """

    counts: Sequence[int]
    wanted: Sequence[int]
    blocks: Sequence[Sequence[int]]
    query_start: Sequence[int]
    seq_lens: Sequence[int]
    tokens: np.ndarray
    logits_indices: Sequence[int]
    num_single: int
    num_probes: int = 0
    inputs: StepInputs = NO_INPUTS

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        counts: Sequence[int],
        blocks: Sequence[Sequence[int]],
        block_size: int,
        *,
        wanted: Sequence[int] = (),
        probes: Sequence[int] = (),
        input_ids: Sequence[int] = (),
        feeds: Sequence[int] = (),
        rope_offsets: Sequence[int] = (),
        inputs: StepInputs = NO_INPUTS,
    ) -> StepLayout:
        """Lay out tokens [start, start + count) of requests.

        Args:
            wanted: the last row of each request by default.
            probes: rows whose logits are also wanted.
            input_ids: of all rows; by default 0.
            feeds: per request, the ``feed_rows`` of its last row; by default -1.
            rope_offsets: per request; by default 0.
        """
        single = len(counts)
        if max(counts, default=1) > 1:
            single = next(i for i, count in enumerate(counts) if count > 1)
        wanted = wanted or [1] * len(counts)
        query_start = list(accumulate(counts, initial=0))
        total = query_start[-1]
        ids, feeds = input_ids or [0] * total, feeds or [-1] * len(counts)
        offsets = rope_offsets or [0] * len(counts)
        tokens = np.empty((len(TOKEN_ROWS), total), np.int64)
        slots = [
            own[at // block_size] * block_size + at % block_size
            for own, at in zip(blocks[:single], starts, strict=False)
        ]
        rope_rows = list(map(add, starts, offsets))
        tokens[:, :single] = (ids[:single], starts[:single], rope_rows[:single], slots, feeds[:single])
        for request in range(single, len(counts)):
            rows = slice(query_start[request], query_start[request + 1])
            at = np.arange(starts[request], starts[request] + counts[request])
            table = np.array(blocks[request], dtype=np.int64)
            slot_rows = table[at // block_size] * block_size + at % block_size
            tokens[0, rows] = ids[rows]
            tokens[1:, rows] = at, at + offsets[request], slot_rows, np.full_like(at, -1)
            tokens[-1, rows][-1:] = feeds[request]
        last_rows = list(compress(range(single), wanted))
        for end, count in zip(query_start[single + 1 :], wanted[single:], strict=True):
            last_rows += range(end - count, end)
        return cls(
            counts=counts,
            wanted=wanted,
            blocks=blocks,
            query_start=query_start,
            seq_lens=list(map(add, starts, counts)),
            tokens=tokens,
            logits_indices=[*last_rows, *probes],
            num_single=single,
            num_probes=len(probes),
            inputs=inputs,
        )

    @property
    def num_requests(self) -> int:
        """Requests in the step."""
        return len(self.counts)

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return self.query_start[-1]

    @property
    def num_logits(self) -> int:
        """Rows of logits, those of probes included."""
        return len(self.logits_indices)

    @property
    def max_query_len(self) -> int:
        """Most rows of a request."""
        return max(self.counts, default=0)

    @property
    def only_decodes(self) -> bool:
        """Whether each request has one row, wanted for logits, and there are no probes."""
        return self.num_single == len(self.counts) == len(self.logits_indices) and not self.num_probes

    @property
    def some_without_input(self) -> bool:
        """Whether cross-attention has nothing to read for some request."""
        lens = self.inputs.encoded_lens
        return not lens or 0 in lens

    @cached_property
    def logits_ends(self) -> Sequence[int]:
        """Where each request's rows of logits end, and the next request's begin."""
        return list(accumulate(self.wanted))

    def rows_of(self, request: int) -> slice:
        """A request's rows of the step."""
        return slice(self.query_start[request], self.query_start[request + 1])

    def logits_of(self, request: int) -> slice:
        """A request's rows of logits, without its probe's."""
        end = self.logits_ends[request]
        return slice(end - self.wanted[request], end)
