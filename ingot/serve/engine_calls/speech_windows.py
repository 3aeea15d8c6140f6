"""Features on their way from the server to an engine, in memory that both processes see.

A window of speech, or a picture, is 1 MB: more than the socket between them takes during a step.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ingot.serve.engine_calls.blank_process import shared_memory

_BYTES = 4  # of a float32


class Windows:
    """The server's side. A slot that is given back may be overwritten: the engine copies a slot when a
    message names it, and of two messages that name a slot the first is of a cancelled request. A given
    ``descriptor`` is closed with this, too.

    Attributes:
        descriptor: of the memory: a file without a name, with as many slots as were ever taken at once.
    """

    def __init__(self, shape: tuple[int, ...], descriptor: int | None = None) -> None:
        self.shape = shape
        self.descriptor = shared_memory() if descriptor is None else descriptor
        self._free: list[int] = []
        self._made = 0
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def handle(self) -> tuple[int, tuple[int, ...]]:
        """Descriptor and shape for the engine's process, which inherits the descriptor."""
        return self.descriptor, self.shape

    @property
    def taken(self) -> int:
        return self._made - len(self._free)

    @contextmanager
    def slot(self) -> Iterator[int]:
        """A slot of one's own; for the event loop's thread."""
        if not self._free:
            self._free.append(self._made)
            self._made += 1
        found = self._free.pop()
        try:
            yield found
        finally:
            self._free.append(found)

    def put(self, slot: int, features: torch.Tensor) -> None:
        """Write features into a slot, in any thread."""
        assert tuple(features.shape) == self.shape
        data = features.to(torch.float32).contiguous().numpy().tobytes()
        place = slot * len(data)
        while data:
            written = os.pwrite(self.descriptor, data, place)
            data, place = data[written:], place + written


class WindowReader:
    """The engine's side."""

    def __init__(self, descriptor: int, shape: tuple[int, ...]) -> None:
        self._descriptor = descriptor
        self._shape = shape

    @classmethod
    def of(cls, handle: tuple[int, tuple[int, ...]] | None) -> WindowReader | None:
        """From the handle that ``Windows`` gives."""
        return None if handle is None else cls(*handle)

    def get(self, slot: int) -> torch.Tensor:
        size = math.prod(self._shape) * _BYTES
        data = os.pread(self._descriptor, size, slot * size)
        assert len(data) == size, "a slot is written before its message is sent"
        return torch.from_numpy(np.frombuffer(data, np.float32).reshape(self._shape).copy())
