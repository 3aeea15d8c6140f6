"""Times of work on a device, read without waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import torch


class Moment:
    """When a GPU gets to this place of its stream; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    @property
    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def ms_to(self, later: Moment) -> float:
        """Milliseconds to a later moment; both have passed."""
        if self._event is None or later._event is None:
            return 1e3 * (later._seconds - self._seconds)
        return self._event.elapsed_time(later._event)


class TimedWork:
    """Times of steps and of the work that follows each on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timed: deque[tuple[Moment, Moment, Moment, tuple[int, int], bool]] = deque()

    def add(self, began: Moment, went_over: Moment, work: tuple[int, int], *, decodes: bool) -> None:
        """A step ran from ``began``, work from ``went_over`` until now; ``decodes``: only decodes in it."""
        self._timed.append((began, went_over, Moment(self._device), work, decodes))

    def passed(self) -> Iterator[tuple[tuple[int, int], float, float | None]]:
        """(work, its milliseconds, those of its step of decodes or None), as far as the device has got."""
        while self._timed and self._timed[0][2].passed:
            began, went_over, ended, work, decodes = self._timed.popleft()
            yield work, went_over.ms_to(ended), began.ms_to(went_over) if decodes else None
