"""A long prompt's chunk, computed a few layers behind each step; its timings set the pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ingot.layers.decoder_forward import Between
from ingot.layers.forward_batch import ForwardBatch
from ingot.runtime.encoding.moment import Moment
from ingot.runtime.scheduling.pace import Pace
from ingot.runtime.scheduling.scheduled_batch import Layers, ScheduledBatch, ScheduledRequest, layout_of
from ingot.runtime.step.chosen_products import Forward
from ingot.runtime.step.prompt_graphs import prompt_buffer
from ingot.runtime.step.step_buffer import StepBuffer


@dataclass(frozen=True)
class _Timed:
    """A step that began, went over to the chunk's layers, and ended; ``decodes``: its work was no more."""

    began: Moment
    went_over: Moment
    ended: Moment
    rows: int
    layers: int
    decodes: bool


class LayeredChunk:
    """The chunk under way; one that a new one follows before its last layer was dropped.

    It runs without a graph, padded to one of the pace's sizes: padding writes to no slot.
    """

    def __init__(self, forward: Forward, pace: Pace, device: torch.device, max_seq_len: int) -> None:
        self.forward = forward
        self.pace = pace
        self.device = device
        self.max_seq_len = max_seq_len
        self._buffers: dict[int, StepBuffer] = {}
        self._batch: ForwardBatch | None = None
        self._at: Between | None = None
        self._reached: tuple[ScheduledRequest, int] | None = None
        self._timed: deque[_Timed] = deque()

    @contextmanager
    def behind(self, step: ScheduledBatch) -> Iterator[None]:
        """Run the step's layers of a chunk behind what the block launches."""
        if step.layers is None:
            yield
            return
        began = Moment(self.device)
        yield
        self._tell_pace()
        went_over = Moment(self.device)
        rows = self._run(step.layers)
        decodes = 0 < step.layout.num_single == len(step.requests)
        layers = step.layers.last - step.layers.first
        self._timed.append(_Timed(began, went_over, Moment(self.device), rows, layers, decodes))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Build the kernels of every size, on padding alone."""
        for rows in self.pace.sizes:
            batch = self._buffer(rows).padded_batch(rows, self.max_seq_len)
            self.forward.through(self.forward.begin(batch), batch, 0, self.pace.num_layers)

    def _run(self, layers: Layers) -> int:
        """Returns the rows of the chunk, padding included."""
        if layers.first == 0:
            self._begin(layers.chunk)
        else:
            assert self._reached == (layers.chunk, layers.first), "layers follow each other"
        assert self._at is not None
        assert self._batch is not None
        self.forward.through(self._at, self._batch, layers.first, layers.last)
        self._reached = layers.chunk, layers.last
        if layers.ends:
            self._at = None
        return len(self._batch.positions)

    def _begin(self, chunk: ScheduledRequest) -> None:
        self._at = None  # of a chunk that was dropped
        rows = self.pace.size_of(chunk.count)
        buffer = self._buffer(rows)
        buffer.fill(layout_of([chunk], self.forward.caches[0].block_size))
        buffer.upload()
        self._batch = buffer.padded_batch(rows, self.max_seq_len)
        self._at = self.forward.begin(self._batch)

    def _buffer(self, rows: int) -> StepBuffer:
        """Its own for each size: the runner's are filled by other steps meanwhile."""
        if rows not in self._buffers:
            self._buffers[rows] = prompt_buffer(self.forward, self.device, self.max_seq_len, rows, 1)
        return self._buffers[rows]

    def _tell_pace(self) -> None:
        """Of the steps that have run by now; nothing waits for the others."""
        while self._timed and self._timed[0].ended.passed:
            one = self._timed.popleft()
            step_ms = one.began.ms_to(one.went_over) if one.decodes else None
            self.pace.told(one.rows, one.layers, one.went_over.ms_to(one.ended), step_ms)
