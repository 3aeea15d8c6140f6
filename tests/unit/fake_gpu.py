"""A GPU that works as late as it may: what was given to it is done when somebody waits for it.

gpu = LateGpu(monkeypatch, "ingot.runtime.step.step_buffer")
gpu.work.append(copy)  # done by the ``synchronize`` of an event that was recorded since
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class LateGpu:
    """Stands in for ``torch.cuda`` in one module, whose tensors are a CPU's.

    Attributes:
        work: what it has not done yet, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        self.work: list[Callable[[], None]] = []
        self._done = 0
        self._failed = False
        monkeypatch.setattr(f"{module}.torch", _Torch(self))

    def fail(self) -> None:
        """From now on every wait is an error."""
        self._failed = True

    def given(self) -> int:
        """How much it has been given so far."""
        return self._done + len(self.work)

    def wait(self, given: int) -> None:
        """Do all up to there."""
        if self._failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        while self._done < given:
            self.work.pop(0)()
            self._done += 1


class LateEvent:
    """As ``torch.cuda.Event``: one that was never recorded is waited for in no time."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self._given = 0

    def record(self, stream: object = None) -> None:
        self._given = self._gpu.given()

    def synchronize(self) -> None:
        self._gpu.wait(self._given)


class _Torch:
    """``torch``, whose tensors of a GPU and in pinned memory are plain ones."""

    def __init__(self, gpu: LateGpu) -> None:
        self.cuda = SimpleNamespace(Event=lambda: LateEvent(gpu), current_stream=lambda device: None)

    def zeros(
        self, *shape: int, device: object = None, pin_memory: bool = False, **given: Any
    ) -> torch.Tensor:
        return torch.zeros(*shape, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
