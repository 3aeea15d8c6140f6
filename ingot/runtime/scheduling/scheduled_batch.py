"""What a step computes, as the scheduler hands it to the runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ingot.layers.step_layout import NO_INPUTS, StepInputs, StepLayout
from ingot.runtime.scheduling.inputs import EncoderEntry, EncoderJob
from ingot.runtime.scheduling.request import Request

EMPTY = StepLayout.of([], [], [], 1)
_NOTHING = EncoderEntry(b"", [], 0)  # of a request without an input


@dataclass(slots=True)
class ScheduledRequest:
    """A request's share of a step: its tokens [start, start + count), placed in ``request.blocks``.

    ``samples``: for how many of its last rows a token is chosen: one where the step reaches the request's
    last token, else none; True and False are 1 and 0.
    """

    request: Request
    start: int
    count: int
    samples: int

    @property
    def probes(self) -> bool:
        """Whether the step reaches the place of the request's probe."""
        probe = self.request.probe
        return probe is not None and self.start <= probe.place < self.start + self.count

    def spans(self, *, encodes: bool) -> Iterator[tuple[int, int, int]]:
        """(index of an input, first and last prompt token) of the placeholders that the share computes."""
        first, last = self.start, self.start + self.count
        for index, given in enumerate(self.request.inputs):
            if given.encodes is encodes and given.tokens and given.is_read_by(first, last):
                yield index, max(given.place, first), min(given.end, last)


@dataclass(frozen=True)
class Layers:
    """Layers [first, last) of a chunk of a long prompt, which a step runs after its own work. The chunk is
    computed when it ``ends``, and never has its request's last token.
    """

    chunk: ScheduledRequest
    first: int
    last: int
    ends: bool


@dataclass
class ScheduledBatch:
    """One step: which tokens run and their layout, which blocks are copied (pairs from, to) and which inputs
    encoded before, who was preempted for it, and layers of a chunk whose request is none of ``requests``.
    ``in_parts``: its inputs, and unready ones of earlier steps, are encoded bit by bit after this and the
    next steps.
    """

    requests: list[ScheduledRequest] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    jobs: list[EncoderJob] = field(default_factory=list)
    in_parts: bool = False
    layers: Layers | None = None
    layout: StepLayout = field(default=EMPTY, compare=False)

    @property
    def probed(self) -> list[Request]:
        """Requests whose probes it reaches, in its order; their rows of logits follow all others."""
        return [item.request for item in self.requests if item.probes]


def layout_of(items: Sequence[ScheduledRequest], block_size: int) -> StepLayout:
    """The layout of requests' shares; blocks of the caches hold ``block_size`` tokens or positions."""
    ids: list[int] = []
    feeds, wanted, probes = [], [], []
    placed = []  # requests with placeholders in reach of the step, and their first rows
    encoded = False
    for index, item in enumerate(items):
        request, start, count, row = item.request, item.start, item.count, len(ids)
        encoded = encoded or bool(request.encoded)
        if start >= request.num_known:  # one pending token: as in most rows of most steps
            ids.append(0)
            feeds.append(request.pending_row)
            wanted.append(int(item.samples))
            continue
        ids += request.tokens(start, start + count)
        pending = len(ids) < row + count  # the last one
        ids += [0] * pending
        feeds.append(request.pending_row if pending else -1)
        wanted.append(count if request.all_logits else int(item.samples))
        if request.probe is not None and item.probes:
            probes.append(row + request.probe.place - start)
        if request.inputs and start < request.inputs[-1].end:
            placed.append((index, row))
    inputs = NO_INPUTS
    if encoded or placed:
        entries = [next(reversed(one.request.encoded.values()), _NOTHING) for one in items]
        inputs = StepInputs(
            encoded_tables=[entry.table for entry in entries if encoded],
            encoded_lens=[entry.positions for entry in entries if encoded],
            spliced=_spliced(items, placed, len(ids), block_size),
            brought=[(index, *span) for index, _ in placed for span in items[index].spans(encodes=False)],
        )
    return StepLayout.of(
        [item.start for item in items],
        [item.count for item in items],
        [item.request.blocks for item in items],
        block_size,
        wanted=wanted,
        probes=probes,
        input_ids=ids,
        feeds=feeds,
        rope_offsets=[item.request.rope_offset for item in items],
        inputs=inputs,
    )


def _spliced(
    items: Sequence[ScheduledRequest], placed: Sequence[tuple[int, int]], total: int, block_size: int
) -> np.ndarray | None:
    """``StepInputs.spliced``; ``placed``: requests with placeholders, and their first rows."""
    found: np.ndarray | None = None
    for index, row in placed:
        request, start = items[index].request, items[index].start
        for number, first, last in items[index].spans(encodes=True):
            found = np.full(total, -1, dtype=np.int64) if found is None else found
            at = np.arange(first, last) - request.inputs[number].place
            table = request.encoded[number].table.astype(np.int64)
            slots = table[at // block_size] * block_size + at % block_size
            found[row + first - start : row + last - start] = slots
    return found
