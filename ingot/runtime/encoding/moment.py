"""Times of work on a device, read without waiting."""

from __future__ import annotations

import time

import torch


class Moment:
    """When a GPU gets to this place of its stream; of a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    @property
    def passed(self) -> bool:
        """Whether the device has got there."""
        return self._event is None or self._event.query()

    def ms_to(self, later: Moment) -> float:
        """Both have passed."""
        if self._event is None or later._event is None:
            return 1e3 * (later._seconds - self._seconds)
        return self._event.elapsed_time(later._event)
