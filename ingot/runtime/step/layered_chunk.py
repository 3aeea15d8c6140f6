"""A long prompt's chunk, computed a few layers behind each step; its timings set the pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ingot.layers.decoder_forward import Between
from ingot.layers.forward_batch import ForwardBatch
from ingot.runtime.encoding.moment import Moment, TimedWork
from ingot.runtime.scheduling.pace import Pace
from ingot.runtime.scheduling.scheduled_batch import (
    EMPTY,
    Layers,
    ScheduledBatch,
    ScheduledRequest,
    layout_of,
)
from ingot.runtime.step.chosen_products import Forward
from ingot.runtime.step.prompt_graphs import prompt_buffer
from ingot.runtime.step.step_buffer import StepBuffer


class LayeredChunk:
    """The chunk in flight; one that a new one follows before its last layer was dropped.

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
        self._timed = TimedWork(device)

    @contextmanager
    def behind(self, step: ScheduledBatch) -> Iterator[None]:
        """Run the step's layers of a chunk after what the block launches."""
        if step.layers is None:
            yield
            return
        began = Moment(self.device)
        yield
        for (rows, count), ms, step_ms in self._timed.passed():
            self.pace.measured(rows, count, ms, step_ms)
        went_over = Moment(self.device)
        rows = self._run(step.layers)
        decodes = 0 < step.layout.num_single == len(step.requests)
        layers = step.layers.last - step.layers.first
        self._timed.add(began, went_over, (rows, layers), decodes=decodes)

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launch every kernel of ``warm_up``."""
        for rows in self.pace.sizes:
            self.forward.launch_some(self._padding(rows))

    def warm_up(self) -> None:
        """Build the kernels of every size, on padding alone."""
        for part in self.warm_up_parts():
            part()

    def warm_up_parts(self) -> list[Callable[[], None]]:
        """``warm_up``, one size each."""
        return [partial(self._run_padding, rows) for rows in self.pace.sizes]

    @torch.inference_mode()
    def _run_padding(self, rows: int) -> None:
        batch = self._padding(rows)
        self.forward.run_layers(self.forward.begin(batch), batch, 0, self.pace.num_layers)

    def _run(self, layers: Layers) -> int:
        """Returns the rows of the chunk, padding included."""
        chunk = layers.chunk
        if layers.first == 0:
            self._at = None  # of a chunk that was dropped
            rows = self.pace.size_of(chunk.count)
            buffer = self._buffer(rows)
            buffer.fill(layout_of([chunk], self.forward.caches[0].block_size))
            buffer.upload()
            self._batch = buffer.padded_batch(rows, self.max_seq_len)
            self._at = self.forward.begin(self._batch)
        else:
            assert self._reached == (chunk, layers.first), "layers follow each other"
        assert self._at is not None
        assert self._batch is not None
        self.forward.run_layers(self._at, self._batch, layers.first, layers.last)
        self._reached = chunk, layers.last
        if layers.ends:
            self._at = None
        return len(self._batch.positions)

    def _padding(self, rows: int) -> ForwardBatch:
        """A step of padding alone, whatever chunk was in its buffer."""
        buffer = self._buffer(rows)
        buffer.fill(EMPTY)
        buffer.upload()
        return buffer.padded_batch(rows, self.max_seq_len)

    def _buffer(self, rows: int) -> StepBuffer:
        """One for each size, as other steps fill the runner's meanwhile."""
        if rows not in self._buffers:
            self._buffers[rows] = prompt_buffer(self.forward, self.device, self.max_seq_len, rows, 1)
        return self._buffers[rows]
