"""Encodings of whole inputs as CUDA graphs, which take the host less time than launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from ingot.runtime.encoding.recording import Recorder


class EncoderGraphs:
    """Captured encodings of 1, 2, 4 … up to ``most`` inputs, whole and in parts, captured when first needed.

    Args:
        keep: encodes features [N, *shape], float32, into the places [N * positions] of their outputs, and
            calls its third argument after every layer.
    """

    def __init__(
        self,
        keep: Callable[[torch.Tensor, torch.Tensor, Callable[[], None] | None], None],
        shape: tuple[int, ...],
        positions: int,
        most: int,
        device: torch.device,
    ) -> None:
        self._keep = keep
        self._shape = shape
        self._features = torch.zeros(most, *shape, device=device)
        self._slots = torch.zeros(most * positions, dtype=torch.int64, device=device)
        self._recorder = Recorder(device)
        self._captured: dict[tuple[int, int | None], list[torch.cuda.CUDAGraph]] = {}

    def fits(self, shape: torch.Size) -> bool:
        return tuple(shape[1:]) == self._shape and shape[0] <= len(self._features)

    def begin(
        self, features: torch.Tensor, slots: torch.Tensor, layers: int | None = None
    ) -> Sequence[torch.cuda.CUDAGraph]:
        """Graphs that encode features [N, *shape] into ``slots`` (on the host) when replayed in order, before
        the next ones begin: of so many ``layers`` each, or one of all. Empty for the first of a number, which
        is encoded at once. Nothing waits for the device.
        """
        count = len(features)
        given, places = self._features[:count], self._slots[: len(slots)]
        given.copy_(features, non_blocking=True)
        places.copy_(slots, non_blocking=True)
        if (count, layers) in self._captured:
            return self._captured[count, layers]
        self._keep(given, places, None)  # also compiles kernels outside of the capture

        def run(cut: Callable[[], None]) -> None:
            ended = itertools.count(1)
            between = None if layers is None else lambda: None if next(ended) % layers else cut()
            self._keep(given, places, between)

        self._captured[count, layers], _ = self._recorder.record_parts(run)
        return ()
