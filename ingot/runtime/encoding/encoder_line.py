"""Encodes inputs beside decodes, a few layers behind each step.

For each input that waits the parts take a share of the step's own time, so that one picture costs the others
little and many are not held up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ingot.config.step_sizes import ENCODER_PART, ENCODER_SHARE
from ingot.runtime.encoding.input_encoding import Encoding
from ingot.runtime.encoding.moment import Moment, TimedWork
from ingot.runtime.scheduling.inputs import EncoderJob
from ingot.runtime.scheduling.pace import cautious
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch


class PartTimes:
    """Times of decode steps and parts. A slower part or faster step counts at once, the opposite slowly."""

    def __init__(self) -> None:
        self._step_ms: float | None = None
        self._part_ms: dict[int, float] = {}  # by the number of inputs

    def fitting(self, inputs: int, waiting: int) -> int:
        """Parts of so many inputs that fit behind a step while so many wait; 1 until times are known."""
        if self._step_ms is None or inputs not in self._part_ms:
            return 1
        return max(int(waiting * ENCODER_SHARE * self._step_ms / self._part_ms[inputs]), 1)

    def add(self, inputs: int, part_ms: float, step_ms: float | None) -> None:
        """Times of a part of so many inputs and of the step before it; None: it did more than decode."""
        self._part_ms[inputs] = cautious(self._part_ms.get(inputs), part_ms, unwelcome=max)
        if step_ms is not None:
            self._step_ms = cautious(self._step_ms, step_ms, unwelcome=min)


class EncoderLine:
    """Inputs of one shape go in one group, and groups one after another: their graphs share memory."""

    def __init__(self, encoding: Encoding, device: torch.device) -> None:
        self._encoding = encoding
        self._device = device
        self._waiting: list[EncoderJob] = []
        self._group: list[EncoderJob] = []
        self._parts: deque[torch.cuda.CUDAGraph] = deque()
        self._launched: list[EncoderJob] = []
        self._times = PartTimes()
        self._timed = TimedWork(device)
        self._passed_over = False  # the last step had a prompt, and no parts behind it

    @contextmanager
    def behind(self, step: ScheduledBatch, *, fused: bool) -> Iterator[None]:
        """Encode parts after what the block launches. A step with a prompt is long enough without parts,
        unless the step before it had one, too; nor are there parts before such a step, which a ready input
        brings.
        """
        if not step.in_parts:
            yield
            return
        self._waiting += step.jobs
        began = Moment(self._device)
        yield
        self._read_times()
        if self._launched:
            self._end(self._launched)
            return
        decodes = step.layout.num_single == len(step.requests)
        self._passed_over = not decodes and not self._passed_over
        if self._passed_over:
            return
        went_over = Moment(self._device)
        inputs, parts = self._advance(fused)
        if parts:
            only = decodes and step.layers is None and bool(step.requests)
            self._timed.add(began, went_over, (inputs, parts), decodes=only)

    def finish(self, *, fused: bool, by_module: bool = False) -> None:
        """Encode all that is left; nothing waits for the device."""
        for part in self._parts:
            part.replay()
        self._encoding.encode(self._waiting, fused=fused, by_module=by_module)
        self._end(self._launched + self._group + self._waiting)
        self.clear()

    def clear(self) -> None:
        """Forget everything: a step has failed."""
        self._waiting, self._group, self._launched = [], [], []
        self._parts.clear()

    def _advance(self, fused: bool) -> tuple[int, int]:
        """Launch what the step has time for; returns the numbers of inputs and of parts."""
        if not self._group:
            self._group = self._encoding.next_group(self._waiting)
            self._waiting = [job for job in self._waiting if job not in self._group]
            self._parts.extend(self._encoding.begin(self._group, fused=fused, layers=ENCODER_PART))
        inputs = len(self._group)
        parts = min(self._times.fitting(inputs, inputs + len(self._waiting)), len(self._parts))
        for _ in range(parts):
            self._parts.popleft().replay()
        if not self._parts:
            self._launched, self._group = self._group, []
        return inputs, parts

    def _end(self, jobs: list[EncoderJob]) -> None:
        """Later steps may read what is launched."""
        for job in jobs:
            job.entry.ready = True
        self._launched = []

    def _read_times(self) -> None:
        for (inputs, parts), ms, step_ms in self._timed.passed():
            self._times.add(inputs, ms / parts, step_ms)
